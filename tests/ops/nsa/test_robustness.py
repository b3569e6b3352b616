"""What the kernels do with values that nobody checked, with NaN, and at the edges of sizes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tilewise.ops.nsa import launch
from tilewise.ops.nsa.choose.launch import choose
from tilewise.ops.nsa.problem import Sizes
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["lists", "union"])
def test_bad_offsets_never_lead_out_of_bounds(order, device):
    """Offsets that decrease.

    Memory around q and k holds huge numbers, so that a read out of bounds shows; results may be anything else.
    """
    around = torch.full((768, 2, 16), 1e15, device=device)
    around[256:512] = torch.randn(256, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    q, k = around[256:512], around[256:512, :1]
    indices = torch.zeros(256, 1, 16, dtype=torch.int32, device=device)
    inputs = make_inputs(q, k, k, indices, torch.tensor([0, 256, 0, 256], dtype=torch.int32, device=device), 64, 0.25)
    o, lse = selected.forward(inputs, order)
    results = o, lse, *selected.backward(inputs, o, lse, q, None, order)[:3]
    assert not any((x.isfinite() & (x.abs() > 1e6)).any() for x in results)


@pytest.mark.gpu
def test_nan_scores_leave_the_forced_blocks_in(device):
    q = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    q[:, 60] = torch.nan
    k_cmp = launch.compress(q, None, None, 8, 4)
    _, lse = launch.compressed_forward(q, k_cmp, k_cmp, None, None, 8, 4, 0.25)
    # One key head a query head, and a NaN query of its own: its windows are NaN for later queries too, its own scores
    # are all NaN.
    chosen = choose(q, k_cmp, lse, None, None, Sizes(8, 4, 8, 3, 1, 1), 0.25)
    assert (chosen[0, 60, :, 0] == 0).all()
    assert (chosen[0, 60] == 7).any(-1).all()


@pytest.mark.gpu
def test_a_row_that_names_nothing_is_zero_beside_a_neighbour_that_sees_nan(device):
    q = k = torch.randn(1, 64, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    v = torch.full_like(k[:, :, :1], torch.nan)
    indices = torch.zeros(1, 64, 1, 2, dtype=torch.int32, device=device)
    indices[:, 1::2] = -1
    for order in ("lists", "union"):
        o, lse = selected.forward(make_inputs(q, k[:, :, :1], v, indices, None, 16, 0.25), order)
        assert (o[:, 1::2] == 0).all()
        assert lse[..., 1::2].isneginf().all()


@pytest.mark.gpu
def test_an_index_that_is_no_block_does_not_become_one(device):
    x = torch.randn(1, 40, 1, 16, generator=torch.Generator().manual_seed(0)).to(device)
    indices = torch.full((1, 40, 1, 1), 2**32 + 1, dtype=torch.int64, device=device)
    o, lse = selected.forward(make_inputs(x, x, x, indices, None, 16, 0.25))
    assert (o == 0).all()
    assert lse.isneginf().all()


@pytest.mark.gpu
def test_no_slots_with_a_sel_scale(device):
    x = torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(0)).to(device)
    indices, sel_scale = (
        torch.zeros(1, 20, 1, 0, dtype=torch.int32, device=device),
        torch.zeros(1, 20, 1, 0, device=device),
    )
    o, lse = launch.attend_forward(x, x, x, indices, sel_scale, True, 16, 0.25)
    *_, dsel = launch.attend_backward(x, x, x, indices, sel_scale, o, lse, o, None, True, 16, 0.25)
    assert dsel.shape == sel_scale.shape


def test_more_blocks_than_the_index_can_number_are_refused():
    x = torch.empty(1, 9_000_000, 1, 1, device="meta")
    indices = torch.empty(1, 9_000_000, 1, 16, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="take larger blocks"):
        make_inputs(x, x, x, indices, None, 1, 1.0)


def test_windows_that_fit_no_tile_are_refused():
    q, k_cmp = torch.empty(1, 256, 1, 256, device="meta"), torch.empty(1, 255, 1, 256, device="meta")
    with pytest.raises(ValueError, match="block_size is 128 and compress_stride is 1.*a wider stride"):
        choose(q, k_cmp, torch.empty(1, 1, 256, device="meta"), None, None, Sizes(2, 1, 128, 2, 1, 1), 1.0)


@pytest.mark.slow
def test_one_channel_compiles():
    """A stride of 1 is a constant to the compiler, which the interpreter does not show."""
    script = """
import json, torch
from tilewise.inspect.compile import compile_launch
from tilewise.ops._host.launching import capture
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs
x = torch.empty(1, 256, 2, 1, dtype=torch.bfloat16, device="meta")
with capture(90) as launches:
    indices = torch.empty(1, 256, 1, 4, dtype=torch.int32, device="meta")
    inputs = make_inputs(x, x[:, :, :1], x[:, :, :1], indices, None, 16, 1.0)
    o, lse = selected.forward(inputs)
    selected.backward(inputs, o, lse, o, None)
chosen = [item for item in launches if "selected" in item.kernel.__name__]
print(json.dumps(sorted({compile_launch(item, 90).kernel.metadata.name for item in chosen})))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": ":".join(sys.path)
    }
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout.splitlines()[-1])) == 7
