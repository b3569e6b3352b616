"""The simulation is the algorithm: in fp64 it equals the reference, in 16 and 32 bits what the kernels store."""

import pytest
import torch

from tilewise.ops.bsa import launch, simulate
from tilewise.ops.bsa.configs import Options
from tilewise.ops.bsa.reference import block_sparse_attn, choice_scores
from tilewise.ops.bsa.selected import launch as selected
from tilewise.ops.nsa.simulate import Tiling, segments

# Tokens, rows a tile, keys a block, blocks chosen.
PROBLEMS = {
    "plain": (44, 16, 16, 2),
    "ragged": (50, 32, 24, 2),
    "narrow": (40, 16, 8, 3),
    "one-block": (40, 64, 16, 1),
    "all-blocks": (40, 16, 16, 8),
    "short": (5, 16, 32, 4),
    "one-token": (1, 16, 16, 1),
}
HEADS, SCALE = 2, 0.3
# Entries of a list that one program takes: so few that lists are divided.
SEGMENT = 10


def make(problem, dtype=torch.float64):
    """q, k, v, u and do [1, T, H, channels], and gates [1, T, H]."""
    tokens = PROBLEMS[problem][0]
    generator = torch.Generator().manual_seed(0)
    shapes = [(16,), (16,), (24,), (24,), (24,), (), ()]
    return [
        torch.randn(1, tokens, HEADS, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def chosen(q, k, problem):
    """The blocks of each head's tokens, [1, H, T, S]: of the best, the token's own among them."""
    _, _, block, count = PROBLEMS[problem]
    scores = choice_scores(q, k, block_size=block, scale=SCALE)
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return best.indices.masked_fill(best.values == -torch.inf, -1).int()


def forward(q, k, v, indices, tiling):
    """o [T, Dv] of one head."""
    rows, present = simulate.partial_outputs(q, k, v, indices, tiling, SCALE).rows()
    return dict(simulate.add_slots(rows, present, "O"))["O_final"]


def backward(q, k, v, do, indices, tiling, base=None):
    """dq, dk and dv of one head."""
    rows, present = simulate.partial_gradients(q, k, v, do, indices, tiling, SCALE).rows()
    dq = dict(simulate.add_slots(rows, present, "dQ", base))["dQ_final"]
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    by_block = {}
    for segment in segments(indices[:, None], tiling.block_size, SEGMENT):
        by_block.setdefault(segment.block, []).append(segment.entries)
    for block, parts in by_block.items():
        keys = slice(block * tiling.block_size, min((block + 1) * tiling.block_size, len(q)))
        ends = dict(simulate.backward_block(q, k, v, do, parts, block, tiling, SCALE))
        dk[keys], dv[keys] = (ends[name][: keys.stop - keys.start] for name in ("dK_final", "dV_final"))
    return dq, dk, dv


def plainly(q, k, v, indices, block):
    """The selected branch of one head from its definition."""
    tokens = torch.arange(len(q), device=q.device)
    seen = (indices[:, :, None] == tokens // block).any(1) & (tokens[None, :] <= tokens[:, None])
    return torch.nn.functional.silu((q @ k.T).masked_fill(~seen, 0.0) * SCALE) / SCALE @ v


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_selected_branch_equals_its_definition_in_fp64(problem):
    _, rows, block, _ = PROBLEMS[problem]
    q, k, v, _, do, _, _ = make(problem)
    indices = chosen(q, k, problem)[0, 1]
    q, k, v, do = (x[0, :, 1] for x in (q, k, v, do))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = plainly(*leaves, indices, block)
    expected = torch.autograd.grad(o, leaves, do)
    with torch.no_grad():
        ours = forward(q, k, v, indices, Tiling(rows, block)), *backward(q, k, v, do, indices, Tiling(rows, block))
        moved = backward(q, k, v, do, indices, Tiling(rows, block), base=q)[0]
    for actual, truth in zip(ours, (o, *expected), strict=True):
        torch.testing.assert_close(actual, truth.detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(moved, expected[0] + q.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_with_layer_norm_it_equals_the_reference_in_fp64(problem, gated):
    tokens, rows, block, count = PROBLEMS[problem]
    q, k, v, u, _, g_cmp, g_slc = make(problem)
    indices = chosen(q, k, problem)
    gates = (g_cmp, g_slc) if gated else (None, None)
    # Blocks' means and attention to them are not simulated here: a block is seen from its last token on.
    whole = tokens // block
    means = [x[0, : whole * block].unflatten(0, (whole, block)).mean(1) for x in (k, v)]
    ended = (torch.arange(whole) + 1) * block - 1 <= torch.arange(tokens)[:, None]
    scores = torch.einsum("ihd,jhd->hij", q[0], means[0]).masked_fill(~ended, 0.0)
    o_cmp = torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores * SCALE) / SCALE, means[1])
    o_slc = torch.stack(
        [forward(q[0, :, h], k[0, :, h], v[0, :, h], indices[0, h], Tiling(rows, block)) for h in range(HEADS)], 1
    )
    expected, _ = block_sparse_attn(
        q, k, v, u, *gates, None, count, block, scale=SCALE, interleave=False, block_indices=indices
    )
    for t in range(tokens):
        branches = {
            name: (x[t], None if gate is None else gate[0, t])
            for name, x, gate in zip(("cmp", "slc"), (o_cmp, o_slc), gates, strict=True)
        }
        torch.testing.assert_close(
            dict(simulate.norm(branches, u[0, t]))["O_final"], expected[0, t], rtol=0, atol=1e-10
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "dtype"), [("plain", torch.bfloat16), ("ragged", torch.float32), ("narrow", torch.float16)], ids=str
)
def test_the_kernels_store_what_the_simulation_makes(problem, dtype, device):
    _, _, block, count = PROBLEMS[problem]
    q, k, v, u, do, g_cmp, g_slc = (x.to(device) for x in make(problem, dtype))
    made = launch.forward(q, k, v, u, (g_cmp, g_slc, None), None, Options(count, block, 0, SCALE, interleave=False))
    inputs = selected.make_inputs(q, k, v, made.block_indices.transpose(1, 2), None, block, SCALE)
    gradients = selected.backward(inputs, do, q)
    tiling = Tiling(inputs.config("selected_fwd").block_m, block)
    for head in range(HEADS):
        indices = made.block_indices[0, head]
        rows = [x[0, :, head] for x in (q, k, v)]
        ours = forward(*rows, indices, tiling), *backward(*rows, do[0, :, head], indices, tiling, base=rows[0])
        for actual, simulation in zip((made.o_slc, *gradients), ours, strict=True):
            # Where rounding falls the other way once, a 16-bit value moves by its last bit.
            allowed = (2e-5 if dtype == torch.float32 else 2**-6) * max(1.0, simulation.abs().max().item())
            torch.testing.assert_close(actual[0, :, head].float(), simulation.float(), rtol=0, atol=allowed)
    for t in range(q.shape[1]):
        branches = {"cmp": (made.o_cmp[0, t], g_cmp[0, t]), "slc": (made.o_slc[0, t], g_slc[0, t])}
        normed = dict(simulate.norm(branches, u[0, t]))["O_final"]
        torch.testing.assert_close(
            made.o[0, t].float(), normed.float(), rtol=0, atol=(1e-4 if dtype == torch.float32 else 2**-5)
        )
