"""The simulation with the tiles of the kernels for Hopper, in their order, makes what they store."""

import sys
from pathlib import Path

import pytest
import torch

from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.ops.flash.hopper.configs import choose_backward, choose_forward, is_wide
from tilewise.ops.flash.simulate import Options, Tiling

sys.path.insert(0, str(Path(__file__).parent))
from simulated import backward, forward

GROUP = 2
PROBLEMS = {
    "plain": (300, 400, Options(0.1)),
    "causal": (450, 450, Options(0.1, right=0)),
    "sees-nothing": (450, 300, Options(0.1, right=0)),
    "window": (400, 500, Options(0.1, left=150, right=20)),
    "softcap": (300, 300, Options(0.3, right=0, softcap=2.0)),
    "negative": (300, 300, Options(-0.1, right=0)),
}
# Wide ones have no softcap in the backward.
CASES = [
    (problem, channels)
    for problem, (*_, options) in PROBLEMS.items()
    for channels in (64, 128, 192, 256)
    if not (options.softcap and is_wide(channels, channels))
]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("problem", "channels"), CASES)
def test_the_kernels_store_what_the_simulation_makes(problem, channels):
    queries, keys, options = PROBLEMS[problem]
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (GROUP, queries, channels),
        (keys, channels),
        (keys, channels),
        (GROUP, queries, channels),
        (GROUP, queries),
    ]
    q, k, v, do, dlse = (torch.randn(shape, generator=generator).to("cuda", torch.bfloat16) for shape in shapes)
    rows_q, rows_do = (x.transpose(0, 1)[None].contiguous() for x in (q, do))
    inputs = launch.Inputs(
        rows_q, k[None, :, None], v[None, :, None], None, None, options.left, options.right, options.scale,
        options.softcap
    )  # fmt: skip
    o, lse = torch.empty_like(rows_q), torch.empty(1, GROUP, queries, device="cuda")
    run_all([hopper_launch.forward_launch(inputs, o, lse)], o.device)
    dq, dk, dv = hopper_launch.backward(inputs, o, lse, rows_do, dlse.float()[None])
    config = choose_forward(
        channels, channels, keys, bool(options.softcap), options.left is not None, options.right is not None
    )
    for head in range(GROUP):
        ours, ours_lse = forward(q[head], k, v, Tiling(config.block_m, config.block_n, reverse=True), options)
        # Where rounding falls the other way once, a 16-bit value moves by its last bit.
        torch.testing.assert_close(o[0, :, head].float(), ours, rtol=0, atol=2**-6)
        torch.testing.assert_close(lse[0, head], ours_lse, rtol=0, atol=2e-5)
    block_m, block_n, *_ = choose_backward(channels, channels)
    wide = is_wide(channels, channels)
    tiles = Tiling(block_m, block_n, reverse=True, rounded_p=wide), Tiling(block_m, block_n, rounded_p=wide)
    gradients = backward(q, k, v, o[0].transpose(0, 1), lse[0], do, dlse.float(), *tiles, options)
    for actual, simulated in zip((dq[0].transpose(0, 1), dk[0, :, 0], dv[0, :, 0]), gradients, strict=True):
        scale = max(1.0, simulated.abs().max().item())
        torch.testing.assert_close(actual.float() / scale, simulated.float() / scale, rtol=0, atol=2**-6)
