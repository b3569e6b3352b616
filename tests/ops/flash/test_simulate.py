"""The simulation is the algorithm: in fp64 it equals the reference, and in a kernel's precision what the
kernel stores.
"""

import sys
from pathlib import Path

import pytest
import torch
from battery import first_quick

from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.flash.simulate import Options, Tiling

sys.path.insert(0, str(Path(__file__).parent))
from simulated import backward, forward

TILES = sorted({(config.block_m, config.block_n) for rows in configs.TABLE.values() for row in rows for config in row})
PROBLEMS = {
    "plain": (70, 150, Options(0.3)),
    "causal": (150, 150, Options(0.3, right=0)),
    "sees-nothing": (97, 33, Options(0.3, right=0)),
    "window": (140, 140, Options(0.3, left=20, right=5)),
    "softcap": (70, 70, Options(0.3, right=0, softcap=2.0)),
    "negative": (70, 70, Options(-0.3, right=0)),
    "zero": (40, 40, Options(0.0)),
    "no-keys": (5, 0, Options(0.3)),
}


def tensors(queries, keys, dtype=torch.float64, group=1):
    generator = torch.Generator().manual_seed(0)
    shapes = [(group, queries, 16), (keys, 16), (keys, 24), (group, queries, 24), (group, queries)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def reference(q, k, v, options):
    left = -1 if options.left is None else options.left
    right = -1 if options.right is None else options.right
    o, lse = flash_attention(
        q.transpose(0, 1)[None],
        k[None, :, None],
        v[None, :, None],
        window_size=(left, right),
        scale=options.scale,
        softcap=options.softcap,
    )
    return o[0].transpose(0, 1), lse[0]


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_forward_equals_the_reference_in_fp64(problem, tiles):
    queries, keys, options = PROBLEMS[problem]
    q, k, v, _, _ = tensors(queries, keys)
    o, lse = reference(q, k, v, options)
    for fused in (True, False):
        for reverse in (False, True):
            ours = forward(q[0], k, v, Tiling(*tiles, fused_softmax=fused, reverse=reverse), options)
            torch.testing.assert_close(ours[0], o[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(ours[1], lse[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_backward_equals_the_reference_in_fp64(problem, tiles):
    queries, keys, options = PROBLEMS[problem]
    q, k, v, do, dlse = (x.requires_grad_() for x in tensors(queries, keys, group=2))
    o, lse = reference(q, k, v, options)
    expected = torch.autograd.grad([o, lse], [q, k, v], [do, dlse])
    for reverse in (False, True):
        with torch.no_grad():
            ours = backward(q, k, v, o, lse, do, dlse, Tiling(*tiles, reverse=reverse), Tiling(*tiles), options)
        for actual, truth in zip(ours, expected, strict=True):
            torch.testing.assert_close(actual.reshape(truth.shape), truth, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize(
    ("problem", "tiles"),
    [
        *((name, (32, 32)) for name in PROBLEMS if name != "no-keys"),
        *(("causal", tiles) for tiles in TILES),
        *(("window", tiles) for tiles in TILES),
    ],
    ids=str,
)
def test_the_kernel_stores_what_the_simulation_makes(problem, tiles, dtype, device):
    queries, keys, options = PROBLEMS[problem]
    q, k, v, do, dlse = (x.to(device) for x in tensors(queries, keys, dtype, group=2))
    inputs = launch.Inputs(
        q.transpose(0, 1)[None].contiguous(),
        k[None, :, None],
        v[None, :, None],
        None,
        None,
        options.left,
        options.right,
        options.scale,
        options.softcap,
    )
    config = configs.Config(*tiles, 4, 1)
    o, lse = launch.forward(inputs, config)
    do_rows, dlse_rows = do.transpose(0, 1)[None].contiguous(), dlse.float()[None]
    dq, dk, dv = launch.backward(inputs, o, lse, do_rows, dlse_rows, config, config)
    tiling = Tiling(*tiles)
    # Where rounding falls the other way once, a 16-bit value moves by its last bit.
    close = {"rtol": 0.0, "atol": 2e-5 if dtype == torch.float32 else 2**-6}
    for head in range(2):
        ours, ours_lse = forward(q[head], k, v, tiling, options)
        torch.testing.assert_close(o[0, :, head].float(), ours, **close)
        torch.testing.assert_close(lse[0, head], ours_lse, rtol=0, atol=2e-5)
    heads_first = o[0].transpose(0, 1)
    gradients = backward(q, k, v, heads_first, lse[0], do, dlse.float(), tiling, tiling, options)
    for actual, simulated in zip((dq[0].transpose(0, 1), dk[0, :, 0], dv[0, :, 0]), gradients, strict=True):
        scale = max(1.0, simulated.abs().max().item())
        torch.testing.assert_close(actual.float() / scale, simulated.float() / scale, **close)
