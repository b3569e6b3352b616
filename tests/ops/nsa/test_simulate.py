"""The simulation is the algorithm: in fp64 it equals the reference, in 16 and 32 bits what the kernels store; its lists
are the kernels' lists.
"""

import pytest
import torch

from tilewise.ops.flash import simulate as flash
from tilewise.ops.nsa import simulate
from tilewise.ops.nsa.reference import compressed_attention, selected_attention
from tilewise.ops.nsa.selected import index
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs
from tilewise.ops.nsa.simulate import Incoming, Tiling, compressed_options
from tilewise.workbench.nsa.base import block_pattern

# Tokens, query heads a key head, rows a tile, keys a block, blocks named, pattern, scale.
PROBLEMS = {
    "holes": (44, 2, 16, 16, 3, "holes", 0.3),
    "repeats": (50, 3, 32, 24, 3, "repeats", 0.3),
    "own": (40, 1, 16, 8, 2, "own", 0.3),
    "negative": (50, 4, 32, 16, 3, "smooth", -0.3),
    "zero": (40, 2, 64, 16, 2, "random", 0.0),
    "short": (5, 2, 16, 32, 4, "repeats", 0.3),
    "one-token": (1, 2, 16, 16, 1, "own", 0.3),
}
KEY_HEADS = 2
# Entries of a list that one program takes: so few that lists are divided.
SEGMENT = 10


def make(problem, dtype=torch.float64, key_heads=1):
    """q [T, H, G, D], k, v, do, dlse likewise by key head, and indices [T, H, S]."""
    tokens, group, _, block, count, pattern, _ = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(0)
    shapes = [(group, 16), (16,), (24,), (group, 24), (group,)]
    q, k, v, do, dlse = (
        torch.randn(tokens, key_heads, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    )
    return q, k, v, do, dlse, block_pattern(pattern, (1, tokens, key_heads, count), block, generator)[0]


def of_problem(problem):
    _, _, rows, block, _, _, scale = PROBLEMS[problem]
    return Tiling(rows, block), scale


def forward(order, q, k, v, indices, tiling, scale):
    """All rows of one key head: o [T, G, Dv] and lse [T, G]."""
    tokens, group, _ = q.shape
    if order == "union":
        tiles = [
            dict(simulate.forward_union(q, k, v, indices, i, tiling, scale))
            for i in range(-(-tokens // tiling.tokens(group)))
        ]
        o, lse = (torch.cat([tile[name] for tile in tiles]) for name in ("O_final", "LSE"))
    else:
        outputs, lses = simulate.partial_outputs(q, k, v, indices, tiling, scale)
        (o, present), (lse, _) = outputs.rows(), lses.rows()
        values = dict(simulate.merge(o, lse, present))
        o, lse = values["O_final"], values["LSE"]
    return o.unflatten(0, (tokens, group)), lse.unflatten(0, (tokens, group))


def backward(order, q, k, v, o, lse, do, dlse, indices, tiling, scale):
    """dq [T, G, D], dk and dv of one key head."""
    tokens, group, _ = q.shape
    delta, lse_log2 = flash.prepare(o, do, lse, dlse)
    incoming = Incoming(do, lse_log2, delta)
    if order == "union":
        tiles = range(-(-tokens // tiling.tokens(group)))
        dq = torch.cat(
            [dict(simulate.backward_union(q, k, v, incoming, indices, i, tiling, scale))["dQ_final"] for i in tiles]
        )
    else:
        rows, present = simulate.partial_gradients(q, k, v, incoming, indices, tiling, scale).rows()
        dq = dict(simulate.sum_gradients(rows, present))["dQ_final"]
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    by_block = {}
    for segment in simulate.segments(indices[:, None], tiling.block_size, SEGMENT):
        by_block.setdefault(segment.block, []).append(segment.entries)
    for block, parts in by_block.items():
        keys = slice(block * tiling.block_size, min((block + 1) * tiling.block_size, tokens))
        ends = dict(simulate.backward_block(q, k, v, incoming, parts, block, tiling, scale))
        dk[keys], dv[keys] = (ends[name][: keys.stop - keys.start] for name in ("dK_final", "dV_final"))
    return dq.unflatten(0, (tokens, group)), dk, dv


def reference(problem, q, k, v, indices):
    """Of one key head."""
    tiling, scale = of_problem(problem)
    o, lse = selected_attention(
        q[None], k[None, :, None], v[None, :, None], indices[None, :, None], block_size=tiling.block_size, scale=scale
    )
    return o[0], lse[0].T


@pytest.mark.parametrize("order", ["lists", "union"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_both_orders_equal_the_reference_in_fp64(problem, order):
    q, k, v, do, dlse, indices = (x[:, 0] for x in make(problem))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    tiling, scale = of_problem(problem)
    o, lse = reference(problem, q, k, v, indices)
    # A row that sees nothing has no gradient.
    dlse = dlse.masked_fill(lse.isinf(), 0.0)
    expected = torch.autograd.grad([o, lse], [q, k, v], [do, dlse])
    with torch.no_grad():
        ours = forward(order, q, k, v, indices, tiling, scale)
        gradients = backward(order, q, k, v, o, lse, do, dlse, indices, tiling, scale)
    for actual, truth in zip((*ours, *gradients), (o, lse, *expected), strict=True):
        torch.testing.assert_close(actual, truth.detach(), rtol=0, atol=1e-10)


def test_windows_are_keys_a_stride_apart():
    q, k, v = (
        torch.randn(rows, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i, rows in enumerate((75, 16, 16))
    )
    options, tiling = compressed_options(75, 12, 4, 0.3), flash.Tiling(16, 16)
    tiles = [dict(flash.forward(q, k, v, i, tiling, options)) for i in range(0, 75, 16)]
    o, lse = compressed_attention(
        q[None, :, None], k[None, :, None], v[None, :, None], compress_size=12, compress_stride=4, scale=0.3
    )
    torch.testing.assert_close(torch.cat([tile["O_final"] for tile in tiles])[:75], o[0, :, 0], rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.cat([tile["LSE"] for tile in tiles])[:75], lse[0, 0], rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_index_kernels_make_the_same_lists_and_unions(problem, device):
    q, k, v, _, _, indices = make(problem, key_heads=KEY_HEADS)
    tokens, group, rows, block, count, _, _ = PROBLEMS[problem]
    q, k, v = (x.float().to(device)[None] for x in (q.flatten(1, 2), k, v))
    named = make_inputs(q, k, v, indices.to(device)[None], None, block, 1.0).named
    (chunk,) = index.chunks(named, 1)
    lists = index.make_lists(named, chunk, SEGMENT, None, 0).lists
    expected = simulate.segments(indices, block, SEGMENT)
    assert int(lists.ends[-1]) == len(expected)
    blocks = -(-tokens // block)
    for segment, (first, entries, i_list, _) in zip(expected, lists.segments.tolist(), strict=False):
        assert i_list == segment.head * blocks + segment.block
        assert [divmod(entry, count) for entry in lists.perm[first : first + entries].tolist()] == segment.entries
    each = Tiling(rows, block).tokens(group)
    unions = index.make_unions(named, each)
    tiles = -(-tokens // each)
    for program, (size, _) in enumerate(unions.sizes.tolist()):
        head, i_tile = divmod(program, tiles)
        # A bit a token, of which the 32nd is the sign.
        bits = [number % 2**32 for number in unions.bits[program, :size].tolist()]
        simulated = simulate.union(indices[:, head], i_tile, each, block)
        assert list(zip(unions.blocks[program, :size].tolist(), bits, strict=True)) == [
            (name, sum(1 << (t - i_tile * each) for t in naming)) for name, naming in simulated
        ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "order", "dtype"),
    [
        ("holes", "lists", torch.bfloat16),
        ("holes", "union", torch.float32),
        ("repeats", "lists", torch.float32),
        ("repeats", "union", torch.bfloat16),
        ("own", "lists", torch.float32),
    ],
    ids=str,
)
def test_the_kernels_store_what_the_simulation_makes(problem, order, dtype, device):
    q, k, v, do, dlse, indices = (x.to(device) for x in make(problem, dtype, KEY_HEADS))
    tiling, scale = of_problem(problem)
    inputs = make_inputs(q.flatten(1, 2)[None], k[None], v[None], indices[None], None, tiling.block_size, scale)
    o, lse = selected.forward(inputs, order)
    dlse = dlse.float().masked_fill(lse[0].T.unflatten(1, (KEY_HEADS, -1)).isinf(), 0.0)
    gradients = selected.backward(inputs, o, lse, do.flatten(1, 2)[None], dlse.flatten(1, 2).T[None], order)[:3]
    dq, dk, dv = (x[0] for x in gradients)
    # Where rounding falls the other way once, a 16-bit value moves by its last bit.
    close = {"rtol": 0.0, "atol": 2e-5 if dtype == torch.float32 else 2**-6}
    o, lse, dq = (
        o[0].unflatten(1, (KEY_HEADS, -1)),
        lse[0].T.unflatten(1, (KEY_HEADS, -1)),
        dq.unflatten(1, (KEY_HEADS, -1)),
    )
    for head in range(KEY_HEADS):
        ours = forward(order, q[:, head], k[:, head], v[:, head], indices[:, head], tiling, scale)
        torch.testing.assert_close(o[:, head].float(), ours[0], **close)
        torch.testing.assert_close(lse[:, head], ours[1], rtol=0, atol=2e-5)
        rows = (x[:, head] for x in (q, k, v, o, lse, do, dlse, indices))
        for actual, simulated in zip((dq, dk, dv), backward(order, *rows, tiling, scale), strict=True):
            size = max(1.0, simulated.abs().max().item())
            torch.testing.assert_close(actual[:, head].float() / size, simulated.float() / size, **close)
