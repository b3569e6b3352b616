"""The selected branch's loop orders, chunks and index, and the rule between them."""

import pytest
import torch

from tilewise.ops.nsa import configs, reference
from tilewise.ops.nsa.selected import index
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import Named, cut_blocks, make_inputs, only_blocks


def problem(device, tokens=70, heads=4, key_heads=2, slots=3, block=16, dtype=torch.float32, cu=None):
    generator = torch.Generator().manual_seed(0)
    shape = (tokens,) if cu is not None else (2, tokens)
    q, k, v, do = (
        torch.randn(*shape, h, 16, generator=generator).to(device, dtype) for h in (heads, key_heads, key_heads, heads)
    )
    indices = torch.randint(-2, -(-tokens // block) + 1, (*shape, key_heads, slots), generator=generator).to(
        device, torch.int32
    )
    return q, k, v, do, indices


def expected(q, k, v, do, indices, block, cu=None):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = reference.selected_attention(*leaves, inside(indices, q.shape[-3], block), block_size=block, cu_seqlens=cu)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do.double())


def inside(indices, tokens, block):
    """What lies outside the sequence is -1: the reference takes nothing else."""
    return indices.where((indices >= 0) & (indices < -(-tokens // block)), torch.full_like(indices, -1))


def run(q, k, v, do, indices, block, order, cu=None):
    inputs = make_inputs(q, k, v, indices, cu, block, q.shape[-1] ** -0.5)
    o, lse = selected.forward(inputs, order)
    dq, dk, dv, _ = selected.backward(inputs, o, lse, do, None, order)
    return o, lse, dq, dk, dv


def assert_close(ours, truth):
    for name, x, y in zip(("o", "lse", "dq", "dk", "dv"), ours, truth, strict=True):
        torch.testing.assert_close(
            x.double(), y, rtol=1e-4, atol=2e-5, msg=lambda message, name=name: f"{name}: {message}"
        )


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("order", ["lists", "union"])
def test_both_orders_compute_the_same(order, device):
    case = problem(device)
    assert_close(run(*case, 16, order), expected(*case, 16))


@pytest.mark.slow
@pytest.mark.gpu
def test_chunks_of_tokens_change_nothing_but_the_order_of_sums(device, monkeypatch):
    """Several chunks, several segments a list: sums go on where the last chunk left them, and further segments are
    added.
    """
    case = problem(device, tokens=75, heads=2, key_heads=2)
    whole = run(*case, 16, "lists")
    monkeypatch.setattr(configs, "LIST_ENTRIES", 32)
    monkeypatch.setattr(configs, "PARTIAL_BYTES", 24 << 10)
    monkeypatch.setattr(configs, "SEGMENT_ENTRIES", dict.fromkeys(configs.SEGMENT_ENTRIES, (4, 4)))
    inputs = make_inputs(*case[:3], case[4], None, 16, 0.25)
    assert len(index.chunks(inputs.named, inputs.named.heads * inputs.named.slots * (16 * 4 + 8))) > 2
    parted = run(*case, 16, "lists")
    assert_close(parted, expected(*case, 16))
    # Interpreted, a row's place in a tile can change the bits of its products.
    assert device.type != "cuda" or torch.equal(whole[0], parted[0])
    assert_close(parted, [x.double() for x in whole])


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["lists", "union", "either"])
def test_the_same_inputs_give_the_same_bits(order, device):
    case = problem(device, tokens=50, dtype=torch.bfloat16)
    first, second = run(*case, 16, order), run(*case, 16, order)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.gpu
def test_a_block_cut_into_parts_and_a_group_cut_into_heads(device, monkeypatch):
    """Where a tile of keys does not fit, or not all heads of a group do, the named blocks are rewritten: the result is
    the same.
    """
    case = problem(device, tokens=61, heads=6, key_heads=1, slots=2, block=32)
    truth = expected(*case, 32)
    monkeypatch.setattr(configs, "KEY_TILE_BYTES", dict.fromkeys(configs.KEY_TILE_BYTES, 2 * 16 * 16 * 4))
    monkeypatch.setattr(configs, "rows_a_token", lambda *_: 2)
    inputs = make_inputs(*case[:3], case[4], None, 32, 0.25)
    assert inputs.named.block_size == 16
    assert inputs.named.heads == 3
    assert_close(run(*case, 32, "lists"), truth)
    assert_close(run(*case, 32, "union"), truth)


@pytest.mark.parametrize("rewrite", [only_blocks, cut_blocks])
def test_rewritten_blocks_are_contiguous(rewrite):
    """As a plan expects them, also of indices [T, H, S] that lie head by head."""
    indices = torch.arange(24, dtype=torch.int32).view(2, 4, 3).transpose(0, 1)
    rewritten = rewrite(indices, 2)
    assert rewritten.is_contiguous()
    assert torch.equal(rewritten, rewrite(indices.contiguous(), 2))


@pytest.mark.gpu
def test_lists_hold_each_entry_once_in_the_order_of_tokens(device):
    """The index against one made by hand, with repeats that count once and with those that count each time."""
    indices = torch.tensor(
        [[[1, 0, 1], [0, 0, -1], [2, 5, 0], [1, 2, 2], [0, 1, 2]]], dtype=torch.int32, device=device
    )[:, :, None, :]
    for once in (True, False):
        named = Named(indices.contiguous(), None, 2, 0, once)
        (chunk,) = index.chunks(named, 1)
        lists = index.make_lists(named, chunk, 64, None, 0).lists
        found = []
        for first, count, block, extra in lists.segments[: int(lists.ends[-1])].tolist():
            assert extra == 0
            found.append((block, [(entry // 3, entry % 3) for entry in lists.perm[first : first + count].tolist()]))
        wanted = []
        for block in range(3):
            entries = [(t, s) for t in range(5) for s in range(3) if indices[0, t, 0, s] == block]
            if once:
                entries = [(t, s) for t, s in entries if (t, s) == min(entry for entry in entries if entry[0] == t)]
            wanted.append((block, entries))
        assert found == wanted


@pytest.mark.gpu
def test_unions_name_each_block_once_from_the_last_down(device):
    indices = torch.tensor([[[1, 0], [3, 1], [0, -1], [2, 2], [3, 9], [0, 0]]], dtype=torch.int32, device=device)[
        :, :, None, :
    ]
    unions = index.make_unions(Named(indices.contiguous(), None, 2, 0, True), 4)
    sizes = unions.sizes.tolist()
    blocks = [unions.blocks[i, : sizes[i][0]].tolist() for i in range(2)]
    bits = [unions.bits[i, : sizes[i][0]].tolist() for i in range(2)]
    # Six tokens have three blocks of two: block 3 is none.
    assert blocks == [[2, 1, 0], [0]]
    assert bits == [[0b1000, 0b0011, 0b0101], [0b0010]]
    # Tokens 0 to 3: every block reaches past token 0. Tokens 4 and 5: block 0 ends before.
    assert [n for _, n in sizes] == [3, 0]


@pytest.mark.parametrize(
    ("direction", "mean_union", "group", "block_size", "query_order"),
    [
        ("fwd", 41, 16, 64, True),
        ("fwd", 42, 16, 64, False),
        ("fwd", 24, 16, 128, True),
        ("fwd", 25, 16, 128, False),
        ("fwd", 60, 4, 64, True),
        ("fwd", 62, 4, 64, False),
        ("dq", 31, 16, 64, True),
        ("dq", 33, 4, 128, False),
    ],
)
def test_the_rule_between_the_orders(direction, mean_union, group, block_size, query_order):
    rest = 100, 16, group, block_size
    assert configs.in_query_order(direction, mean_union * 100, *rest) is query_order
    assert bool(configs.in_query_order(direction, torch.tensor(mean_union * 100), *rest)) is query_order


@pytest.mark.gpu
def test_the_device_chooses_the_order(device, monkeypatch):
    """Both are launched; a rule that says the other one gives that one's bits, and nothing of it is known
    on the host.
    """
    case = problem(device, tokens=60, dtype=torch.bfloat16)
    inputs = make_inputs(*case[:3], case[4], None, 16, 0.25)
    for answer, order in ((True, "union"), (False, "lists")):
        monkeypatch.setattr(
            configs, "in_query_order", lambda direction, union, *_, answer=answer: (union < torch.inf) == answer
        )
        assert torch.equal(selected.forward(inputs, "either")[0], selected.forward(inputs, order)[0])


def test_every_block_size_has_parts_that_fit_or_is_refused():
    for block in range(1, 129):
        parts = configs.parts_of_block(block, 256, 4, 90)
        assert parts == 0 or block % parts == 0
        assert parts > 0 or block % 16 != 0
    assert configs.parts_of_block(64, 128, 2, 90) == 1
    assert configs.parts_of_block(127, 256, 4, 90) == 0
    x = torch.zeros(1, 127, 1, 256)
    with pytest.raises(ValueError, match="block_size is 127.*a multiple of 16"):
        make_inputs(x, x, x, torch.zeros(1, 127, 1, 1), None, 127, 1.0)
