"""Taps tell the same as the simulation, compiled on a GPU as well as interpreted."""

import pytest
import torch

from tilewise import interpreter
from tilewise.ops.flash.configs import Config
from tilewise.trace import flash, tapped
from tilewise.trace.flash import Case
from tilewise.trace.judge import first_divergence, judge

pytestmark = pytest.mark.gpu


def make(tokens, causal, dtype, device):
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, tokens, flash.HEADS, 64, generator=generator).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(1, tokens, 1, 64, generator=generator).to(device, dtype) for _ in range(2))
    return Case(q, k, v, causal), do


def verdict(traced, dtype):
    rows = judge(traced.kernel, traced.simulation, traced.exact, list(traced.simulation), float(torch.finfo(dtype).eps))
    return rows, first_divergence(rows, traced.steps, flash.ORDER[traced.part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("program", "tokens"), [(0, 64), (1, 64), (2, 75)])
def test_taps_agree_with_the_simulation(program, tokens, causal, dtype, device):
    case, do = make(tokens, causal, dtype, device)
    config = Config(32, 32, 4, 1)
    with interpreter.quiet():
        traces = [tapped.tap_forward(case, config, program), *tapped.tap_backward(case, do, config, program)]
    for traced in traces:
        rows, row = verdict(traced, dtype)
        assert row is None, (traced.part, traced.place, row)
        assert len(rows) >= 7 * traced.steps
        assert traced.steps


def test_a_wrong_value_is_seen(device):
    case, _ = make(64, False, torch.bfloat16, device)
    with interpreter.quiet():
        traced = tapped.tap_forward(case, Config(32, 32, 4, 1), 0)
    traced.kernel["L_1"][3] *= 1.01
    assert verdict(traced, torch.bfloat16)[1].name == "L_1"
