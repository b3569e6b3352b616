"""Taps tell the same as the simulation, compiled on a GPU as well as interpreted."""

import pytest
import torch
from battery import first_quick

from tilewise import interpreter
from tilewise.ops.flash.configs import Config
from tilewise.ops.flash.simulate import Options
from tilewise.ops.nsa.simulate import compressed_options
from tilewise.trace.explain import first_divergence, judge
from tilewise.workbench.flash import trace
from tilewise.workbench.flash.programs import HEADS, Case

pytestmark = pytest.mark.gpu


def make(tokens, mask, dtype, device):
    """As the mask says: none, causal, or a window a key."""
    generator = torch.Generator().manual_seed(0)
    keys = (tokens - 4) // 2 + 1 if mask == "windows" else tokens
    options = (
        compressed_options(tokens, 4, 2, 0.125)
        if mask == "windows"
        else Options(0.125, right=0 if mask == "causal" else None)
    )
    q, do = (torch.randn(1, tokens, HEADS, 64, generator=generator).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(1, keys, 1, 64, generator=generator).to(device, dtype) for _ in range(2))
    return Case(q, k, v, options), do


def verdict(traced, dtype):
    rows = judge(traced, float(torch.finfo(dtype).eps))
    return rows, first_divergence(rows, traced.steps, traced.order)


@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "windows"])
@pytest.mark.parametrize(("program", "tokens"), [(0, 64), (1, 64), (2, 75)])
def test_taps_agree_with_the_simulation(program, tokens, mask, dtype, device):
    case, do = make(tokens, mask, dtype, device)
    config = Config(32, 32, 4, 1)
    with interpreter.quiet():
        traces = [trace.tap_forward(case, config, program), *trace.tap_backward(case, do, config, program)]
    for traced in traces:
        rows, row = verdict(traced, dtype)
        assert row is None, (traced.part, traced.place, row)
        assert len(rows) >= 7 * traced.steps
        assert traced.steps


def test_a_wrong_value_is_seen(device):
    case, _ = make(64, "none", torch.bfloat16, device)
    with interpreter.quiet():
        traced = trace.tap_forward(case, Config(32, 32, 4, 1), 0)
    traced.kernel["L_1"][3] *= 1.01
    assert verdict(traced, torch.bfloat16)[1].name == "L_1"
