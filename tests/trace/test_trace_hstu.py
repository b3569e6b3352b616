"""trace of HSTU attention: nothing where nothing is wrong, recorded or through taps, and of each planted bug the right
value in the right block.
"""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from battery import first_quick
from typer.testing import CliRunner

from tilewise import cli, interpreter
from tilewise.ops.hstu.configs import Config
from tilewise.ops.hstu.simulate import Options
from tilewise.trace import command
from tilewise.trace.request import Request
from tilewise.workbench.hstu import trace as hstu_programs
from tilewise.workbench.hstu.trace import HEADS, LEAD, Case
from tilewise.workbench.operator import UsageError

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")


def invoke(tmp_path, *words):
    return CliRunner().invoke(cli.app, ["trace", "hstu", *words, "--out", str(tmp_path)])


def assert_all_agree(lines):
    assert lines
    assert all(re.fullmatch(r"✓ .*: \d+ values in [1-9]\d* steps agree", line) for line in lines), lines


@interpreted
@pytest.mark.parametrize(
    "words",
    [
        "--block-m 32 --block-n 16",
        "--block-m 16 --block-n 32 --seq-blocks 3 --causal --dtype fp16 --program 1 --head 1 -r",
        "--block-m 32 --block-n 32 --causal --dtype fp32 --warp 1",
        "--block-m 32 --block-n 16 --direction backward --causal --dtype fp16",
        "--block-m 16 --block-n 32 --direction backward --dtype fp32 --program 1 --head 1 --warp 3",
        "--kernel-index 0 --causal --seq-blocks 1",
    ],
)
def test_right_kernels_agree(tmp_path, words):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 0, outcome.output
    assert_all_agree(outcome.output.splitlines()[:-1])


@interpreted
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "mask", [{"targets": 20}, {"max_attn_len": 9}, {"targets": 20, "context": 18, "max_attn_len": 9}], ids=str
)
def test_right_kernels_agree_under_every_mask(tmp_path, mask, direction, causal):
    request = Request("hstu", 16, 16, seq_blocks=4, program=2, direction=direction, causal=causal, out=tmp_path, **mask)
    lines, agrees = command.run_trace(request)
    assert agrees, lines
    assert_all_agree(lines[:-1])


@interpreted
def test_the_programs_asked_for_are_traced(tmp_path):
    # Heads of one tile are neighbours; under the causal mask the last tile of queries comes first.
    words = ("--block-m", "16", "--block-n", "16", "--head", "1", "--program", "1", "--seq-blocks", "4")
    assert "hstu_fwd_kernel, program 3, head 1, rows 16 to 31" in invoke(tmp_path, *words).output
    backward = invoke(tmp_path, *words, "--causal", "--direction", "backward").output
    assert "hstu_bwd_dkdv_kernel, program 3, head 1, keys 16 to 31" in backward
    assert "hstu_bwd_dq_kernel, program 3, head 1, rows 32 to 47" in backward


# A planted bug: module, what is replaced by what, request; what the first line must say, and what must follow from it.
SMALL = {"block_m": 16, "block_n": 16, "seq_blocks": 3, "causal": True}
BACKWARD = SMALL | {"direction": "backward"}
BUGS = {
    "offset": (
        "hstu.kernels.fwd",
        "k_rows = Rows(k, strides.k, i_b, i_h, start_k, Tk)",
        "k_rows = Rows(k, strides.k, i_b, i_h, 0, Tk)",
        SMALL,
        "block 0, K",
        "the load of K",
    ),
    "causal": (
        "_device.scores",
        "o_n <= o_m + (off + right)",
        "o_n < o_m + (off + right)",
        SMALL,
        "block 2, P",
        "the mask: row 0 does not see key 0 of this tile, 16 pairs in all",
    ),
    "targets": (
        "_device.history",
        "(o_m == o_n) | (d > 0)",
        "(o_m == o_n) | (d >= 0)",
        SMALL | {"targets": 4},
        "block 2, P",
        "the mask: row 12 sees key 13 of this tile, 12 pairs in all",
    ),
    "reach": (
        "_device.history",
        "m_keep & (d <= reach)",
        "m_keep & (d < reach)",
        SMALL | {"targets": 4, "max_attn_len": 20},
        "block 0, P",
        "the mask: row 0 does not see key 12 of this tile, 4 pairs in all",
    ),
    "range": (
        "_device.history",
        "high = tl.minimum(n_tokens, i_m + BLOCK_M)",
        "high = n_tokens",
        SMALL | {"targets": 4, "program": 1},
        "steps",
        "which tiles the mask reaches",
    ),
    "sigmoid": (
        "_device.scores",
        "b_s * -alpha_log2",
        "b_s * alpha_log2",
        SMALL,
        "block 0, P",
        "SiLU of the scores, or the mask",
    ),
    "sum": (
        "hstu.kernels.fwd",
        "b_v, acc, input_precision",
        "b_v, input_precision",
        SMALL,
        "block 1, O",
        "what it is added to",
    ),
    "factor": (
        "hstu.kernels.fwd",
        "i_m, acc * scales.factor, TILE.DV",
        "i_m, acc, TILE.DV",
        SMALL,
        "O_final",
        "O_final is 384 times what it should be",
    ),
    "slope": (
        "_device.scores",
        "(ratio - ratio * b_sigmoid) + b_sigmoid",
        "(ratio - ratio * b_sigmoid)",
        BACKWARD,
        "block 0, dS",
        "dS = dP · the slope of SiLU",
    ),
    "dV": (
        "hstu.kernels.bwd",
        "b_do, acc_dv, input_precision",
        "b_do, input_precision",
        BACKWARD,
        "block 1, dV",
        "the product of P and dO",
    ),
    "dQ": (
        "hstu.kernels.bwd",
        "b_ds = tl.where(",
        "_ = tl.where(",
        BACKWARD,
        "block 2, dS",
        "the mask: row 0 sees key 1 of this tile",
    ),
}
RUN = """
import json, sys
from pathlib import Path
from tilewise import interpreter
from tilewise.verify.planting import plant
from tilewise.verify.suite import Mutant
interpreter.use_where_no_gpu()
module, old, new, request, out = sys.argv[1:]
plant(Mutant("planted", "", module, old, new))
from tilewise.trace.command import run_trace
from tilewise.trace.request import Request
lines, agrees = run_trace(Request("hstu", out=Path(out), **json.loads(request)))
print("\\n".join(lines))
sys.exit(not agrees)
"""


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_bug_is_found_where_it_is(tmp_path, bug):
    module, old, new, request, place, follows = BUGS[bug]
    arguments = [sys.executable, "-c", RUN, module, old, new, json.dumps(request), str(tmp_path)]
    outcome = subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    firsts = re.findall(r"first mismatch: (.*)\[", outcome.stdout)
    assert place in firsts, outcome.stdout + outcome.stderr
    assert follows in outcome.stdout, outcome.stdout


def make(tokens, options, dtype, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(LEAD + tokens, HEADS, 64, generator=generator).to(device, dtype) for _ in range(4))
    return Case(q, k, v, options, Config(32, 16, 4, 1)), do


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize(
    "options",
    [
        Options(0.125, 80),
        Options(0.125, 80, causal=False, max_attn_len=20),
        Options(0.125, 80, targets=20, max_attn_len=9, contextual_seq_len=40),
    ],
    ids=["causal", "reach", "history"],
)
@pytest.mark.parametrize("program", [0, 2])
def test_taps_agree_with_the_simulation(program, options, dtype, device):
    # The last tile of queries has 11 of 32 rows, that of keys 11 of 16.
    case, do = make(75, options, dtype, device)
    with interpreter.quiet():
        traces = [
            hstu_programs.trace_forward(case, 1, program, True),
            *hstu_programs.trace_backward(case, do, 1, program, True),
        ]
    for traced in traces:
        lines, agrees = command.verdict(traced, float(torch.finfo(dtype).eps))
        assert agrees, lines
        assert traced.steps
        # What stays in a backward's program is not tapped.
        assert set(traced.simulation) - set(traced.kernel) <= {"Q", "dO", "K", "V"}


@pytest.mark.gpu
def test_a_wrong_value_and_a_step_too_many_are_seen(device):
    case, _ = make(64, Options(0.125, 80), torch.bfloat16, device)
    with interpreter.quiet():
        traced = hstu_programs.trace_forward(case, 0, 0, True)
    traced.kernel["P_1"][3] *= 1.01
    assert "block 1, P" in command.verdict(traced, 2**-7)[0][0]
    traced.kernel["steps"] += 1
    assert "first mismatch: steps" in command.verdict(traced, 2**-7)[0][0]


@interpreted
def test_recorded_and_tapped_values_are_the_same():
    case, do = make(40, Options(0.125, 80, targets=10, contextual_seq_len=3), torch.bfloat16, torch.device("cpu"))
    with interpreter.quiet():
        recorded, tapped = (
            [hstu_programs.trace_forward(case, 0, 1, taps), *hstu_programs.trace_backward(case, do, 0, 1, taps)]
            for taps in (False, True)
        )
    for one, other in zip(recorded, tapped, strict=True):
        assert one.place == other.place
        for name, value in other.kernel.items():
            np.testing.assert_array_equal(value, one.kernel[name], err_msg=name)


@interpreted
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--order lists", "--order means nothing to hstu"),
        ("--impl a.py:f", "--impl means nothing to hstu"),
        ("--program 2", "there are 2 heads of 2 programs each: expected --head 0 to 1 and --program 0 to 1"),
        ("--head 2", "there are 2 heads"),
        ("--block-m 24", "expected a power of two"),
        ("--kernel-index 999", "there is no configuration 999"),
        ("--kernel-index 1 --block-n 32", "give one of them"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, words, message):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 2, outcome.output
    assert message in " ".join(outcome.output.split())


@interpreted
@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("hstu", targets=-1), "--targets -1: expected 0 or more"),
        (Request("hstu", block_m=16, targets=33), "the sequence has 32 tokens"),
        (Request("flash", max_attn_len=3), "--max-attn-len means nothing to flash"),
        (Request("nsa-selected", context=3), "--context means nothing to nsa-selected"),
    ],
    ids=str,
)
def test_masks_that_cannot_be(request_, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        command.run_trace(request_)


@interpreted
def test_what_is_written(tmp_path):
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    from pages import Balanced

    page = tmp_path / "trace.html"
    request = Request("hstu", 16, 16, causal=True, targets=5, context=2, max_attn_len=20, out=tmp_path, html=page)
    assert command.run_trace(request)[1]
    simulation, kernel = ((tmp_path / name).read_text().splitlines() for name in ("debug_pt.txt", "debug_kernel.txt"))
    headings = [line for line in simulation if line.startswith(("==", "--", "####"))]
    assert headings == [line for line in kernel if line.startswith(("==", "--", "####"))]
    names = [line.split()[1] for line in headings if line.startswith("==")]
    assert names[:7] == ["steps", "Q", "K_0", "S_0", "P_0", "V_0", "O_0"]
    assert names[-3:] == ["O_final", "O_full", "O_ref"]
    arrays = np.load(tmp_path / "trace.npz")
    final, full = (
        next(arrays[key] for key in arrays if key.startswith("kernel/forward: ") and key.endswith(end))
        for end in ("/O_final", "/O_full")
    )
    np.testing.assert_allclose(final, full, atol=2e-2)
    text = Balanced(page.read_text(encoding="utf-8")).text
    assert all(
        words in text
        for words in ("causal, 5 targets, 2 tokens of context, 20 tokens of reach", "tiles 16 queries × 16 keys")
    )
