"""What surrounds Hopper's backward kernel, with torch in its place: rows prepared for it, its scales, and dq from the
accumulators that it leaves.
"""

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._host.launching import capture
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.ops.flash.hopper.configs import choose_backward

# Of all widths.
BLOCK_M = choose_backward(64, 64).block_m

pytestmark = pytest.mark.gpu


def private(tile, width, wide):
    """[M, D] as the kernel leaves it in memory, 0 past D: [D / 8, M, 8]; of wide ones [D / 16, M, 4, 2, 2]."""
    whole = torch.zeros(BLOCK_M, width)
    whole[: tile.shape[0], : tile.shape[1]] = tile
    if wide:
        return whole.view(BLOCK_M, -1, 2, 4, 2).permute(1, 0, 3, 2, 4).reshape(-1)
    return whole.view(BLOCK_M, -1, 8).transpose(0, 1).reshape(-1)


def sequences(arguments):
    """(q, k, v, do) rows of each sequence: batch entry, queries, keys."""
    offsets = arguments["offsets"]
    if offsets.q is None:
        return [(b, slice(None), slice(None)) for b in range(arguments["q"].base.shape[0])]
    cu_q, cu_k = offsets.q.tolist(), offsets.k.tolist()
    return [(None, slice(*cu_q[i : i + 2]), slice(*cu_k[i : i + 2])) for i in range(len(cu_q) - 1)]


def main_in_torch(arguments):
    """What the kernel computes, from its own arguments, in fp32; tiles that no key meets are left as they are."""
    tile, scales = arguments["TILE"], arguments["scales"]
    width = tile.BLOCK_D
    slots = hopper_launch.tile_slots(arguments["n_queries"], BLOCK_M, arguments["offsets"].q)
    group = arguments["group"]
    # A group's heads inside of a slot, or each with slots of its own; by head and slot: [all query heads, slots, ...].
    inside = 1 if tile.SWEEPS else group

    def by_head(x, size):
        return x.view(-1, slots, inside, size).transpose(1, 2).flatten(0, 1)

    lse, delta = (by_head(arguments[name].base, BLOCK_M) for name in ("lse_log2", "delta"))
    acc_dq = arguments["workspace"].acc_dq.view(-1, slots, inside, BLOCK_M * width)
    dk, dv = arguments["dk"].base, arguments["dv"].base
    for b, queries, keys in sequences(arguments):
        q, g = (arguments[name].base[queries if b is None else b] for name in ("q", "do"))
        k, v = (arguments[name].base[keys if b is None else b] for name in ("k", "v"))
        place_k = (keys,) if b is None else (b,)
        first = queries.start // BLOCK_M + sequences(arguments).index((b, queries, keys)) if b is None else 0
        heads = q.shape[1]
        off = len(k) - len(q)
        i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
        keep = torch.ones(len(q), len(k), dtype=torch.bool)
        if arguments["left"] is not None:
            keep &= j >= i + off - arguments["left"]
        if arguments["right"] is not None:
            keep &= j <= i + off + arguments["right"]
        sum_dk, sum_dv = torch.zeros(k.shape), torch.zeros(v.shape)
        for h in range(heads):
            hk, row = h // group, (b or 0) * heads + h
            tiles = -(-len(q) // BLOCK_M)
            rows = [x[row, first : first + tiles].reshape(-1)[: len(q), None] for x in (lse, delta)]
            s = q[:, h].float() @ k[:, hk].float().T
            if scales.score_scale is not None:
                s = (s * scales.score_scale).tanh()
            p = torch.where(keep, torch.exp2(s * scales.scale_log2 - rows[0]), 0.0)
            ds = p * (g[:, h].float() @ v[:, hk].float().T - rows[1])
            if scales.score_scale is not None:
                ds = ds * (1 - s * s)
            sum_dv[:, hk] += p.T @ g[:, h].float()
            sum_dk[:, hk] += ds.T @ q[:, h].float()
            dq = ds @ k[:, hk].float()
            for m in range(tiles):
                of_tile = slice(m * BLOCK_M, (m + 1) * BLOCK_M)
                if keep[of_tile].any():
                    acc_dq[row // inside, first + m, row % inside] = private(dq[of_tile], width, tile.WIDE)
        dk[place_k] = (sum_dk * scales.scale).to(dk.dtype)
        dv[place_k] = sum_dv.to(dv.dtype)


USUAL = {
    "tokens": 0,
    "keys": 0,
    "channels": 64,
    "heads": 2,
    "heads_k": 2,
    "left": -1,
    "right": -1,
    "softcap": 0.0,
    "scale": 0.2,
    "causal": False,
}
CASES = {
    "dense causal, fewer keys": {"tokens": 150, "keys": 70, "causal": True},
    "window of groups, narrow": {"tokens": 130, "keys": 200, "heads_k": 1, "left": 20, "right": 10, "channels": 40},
    "causal groups": {"tokens": 150, "keys": 140, "heads": 6, "causal": True},
    "groups": {"tokens": 70, "keys": 140, "heads": 4},
    "packed groups": {"lengths": (70, 0, 5, 64), "lengths_k": (3, 9, 0, 140), "heads": 4, "causal": True},
    "packed with empty ones": {"lengths": (70, 0, 5, 64), "lengths_k": (3, 9, 0, 140), "causal": True, "channels": 72},
    "in three pieces": {"tokens": 70, "keys": 140, "heads": 4, "channels": 192, "causal": True},
    "softcap, negative scale": {"tokens": 70, "keys": 80, "softcap": 5.0, "scale": -0.3},
}


def run_around(launches, device):
    """What runs a part's launches, with torch in the main kernel's place."""
    prepare, main, finish = launches
    k, offsets = main.arguments["k"].base, main.arguments["offsets"]
    blocks = (
        hopper_launch.tile_slots(k.shape[-3], main.arguments["TILE"].BLOCK_N, offsets.k)
        * k.shape[-2]
        * (k.shape[0] if offsets.k is None else 1)
    )
    assert main.grid == min(blocks, hopper_launch.sm_count(device))
    run_all([prepare], device)
    workspace = main.arguments["workspace"]
    assert not workspace.semaphores.any()
    assert not workspace.counter.any()
    # In the fixed order the first block stores: accumulators need not be zeroed, and here they are NaN.
    assert workspace.acc_dq.isnan().all() if main.arguments["TILE"].ORDERED else not workspace.acc_dq.any()
    main_in_torch(main.arguments)
    run_all([finish], device)


@pytest.mark.parametrize("most", [hopper_launch.MOST_BYTES, 1], ids=["whole", "chunks"])
@pytest.mark.parametrize("order", ["fixed", "cleared"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="with a GPU the kernel itself runs")
def test_prepare_and_finish(name, order, most, monkeypatch):
    monkeypatch.setattr(hopper_launch, "MOST_BYTES", most)
    monkeypatch.setattr(hopper_launch, "sm_count", lambda _device: 1)
    monkeypatch.setattr(hopper_launch, "emit", lambda beside, *launches: run_around(launches, beside.device))
    case = USUAL | CASES[name]
    generator = torch.Generator().manual_seed(0)
    lengths, lengths_k = case.get("lengths"), case.get("lengths_k")

    def draw(tokens, packed_tokens, heads, channels):
        shape = (sum(packed_tokens),) if packed_tokens else (2, tokens)
        return torch.randn(*shape, heads, channels, generator=generator).to(torch.bfloat16)

    q = draw(case["tokens"], lengths, case["heads"], case["channels"])
    k, v = (draw(case["keys"], lengths_k, case["heads_k"], channels) for channels in (case["channels"], 64))
    do = draw(case["tokens"], lengths, case["heads"], 64)
    cu_q, cu_k = (None if x is None else torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, lengths_k))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention(
        *leaves,
        causal=case["causal"],
        window_size=(case["left"], case["right"]),
        scale=case["scale"],
        softcap=case["softcap"],
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        return_lse=True,
        backend="reference",
    )
    dlse = torch.randn(lse.shape, generator=generator)
    expected = torch.autograd.grad([o, lse], leaves, [do.double(), torch.where(lse.isfinite(), dlse, 0.0).double()])

    inputs = launch.make_inputs(
        q, k, v, cu_q, cu_k, case["causal"], case["left"], case["right"], case["scale"], case["softcap"]
    )
    gradients = hopper_launch.plan_backward(inputs, o.detach().to(q.dtype), lse.detach().float(), do, dlse, order)
    for actual, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("batch", "heads_k", "most", "expected"),
    [
        (3, 4, 12, [(3, 4)]),
        (3, 4, 11, [(1, 4), (2, 4)]),
        (3, 4, 4, [(1, 4)] * 3),
        (2, 4, 3, [(1, 2)] * 4),
        (1, 4, 3, [(1, 2)] * 2),
        (1, 3, 0.5, [(1, 1)] * 3),
        (None, 4, 4, [(None, 4)]),
        (None, 5, 4, [(None, 2), (None, 3)]),
    ],
)
def test_chunks_of_what_needs_more_memory(batch, heads_k, most, expected, monkeypatch):
    """Batch entries and KV heads of each chunk, where accumulators of so many KV heads of one entry have room."""
    group, slots = 2, 3 if batch else 4
    monkeypatch.setattr(hopper_launch, "sm_count", lambda _device: 1)
    monkeypatch.setattr(hopper_launch, "MOST_BYTES", int(most * 4 * slots * BLOCK_M * group * 64))
    lead = (150,) if batch is None else (batch, 150)
    q, k = (torch.empty(*lead, heads, 40, dtype=torch.bfloat16) for heads in (heads_k * group, heads_k))
    offsets = None if batch else torch.tensor([0, 70, 150], dtype=torch.int32)
    inputs = launch.make_inputs(q, k, k, offsets, offsets, True, -1, -1, 0.1, 0.0)
    lse = torch.empty(*lead[:-1], heads_k * group, 150)
    with capture(90) as launches:
        hopper_launch.plan_backward(inputs, q, lse, q, None)
    mains = [one.arguments for one in launches[1::3]]
    assert [(None if batch is None else one["q"].base.shape[0], one["k"].base.shape[-2]) for one in mains] == expected
    assert all(one["group"] == group for one in mains)
    assert all(one.arguments["lse"].is_contiguous() for one in launches[::3])


@pytest.mark.parametrize(
    ("batch", "heads_k", "keys", "chunks"),
    [(1, 16, 512, 1), (1, 64, 512, 2), (8, 64, 512, 16), (4, 16, 8192, 4 * 6), (1, 2, 8192, 1)],
)
def test_chunks_have_blocks_of_keys_for_all_sms(batch, heads_k, keys, chunks, monkeypatch):
    """A block has 128 keys, and there are 132 SMs: 33 heads of 512 keys, or 3 of 8,192."""
    monkeypatch.setattr(hopper_launch, "MOST_BYTES", 1)
    q, k = (torch.empty(batch, tokens, heads_k, 64, dtype=torch.bfloat16, device="meta") for tokens in (70, keys))
    inputs = launch.make_inputs(q, k, k, None, None, False, -1, -1, 0.1, 0.0)
    assert len(list(hopper_launch._chunks(inputs))) == chunks


@pytest.mark.parametrize(
    ("tokens", "sequences", "causal", "expected"),
    [
        (2048, None, True, 16),
        (2048, None, False, 8),
        (16384, None, True, 4),
        (16384, None, False, 2),
        (32768, 16, True, 16),
        (32768, 2, True, 4),
    ],
)
def test_heads_side_by_side(tokens, sequences, causal, expected):
    """By the length of a sequence, not by that of all packed ones together."""
    x = torch.empty(*(() if sequences else (1,)), tokens, 2, 64, dtype=torch.bfloat16)
    offsets = None if sequences is None else torch.linspace(0, tokens, sequences + 1).int()
    inputs = launch.make_inputs(x, x, x, offsets, offsets, causal, -1, -1, 0.1, 0.0)
    lse = torch.empty(2, tokens)
    _, main, _ = hopper_launch.backward_launches(inputs, x, lse, x, None, (x, x, x), "fixed")
    assert main.arguments["together"] == expected
