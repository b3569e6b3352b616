"""trace of block-sparse attention: nothing where nothing is wrong, and of each planted bug the right value in the right
step.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.configs import Options
from tilewise.trace import command
from tilewise.workbench.bsa import trace as bsa_programs
from tilewise.workbench.bsa.trace import Case

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")


def invoke(tmp_path, *words):
    return CliRunner().invoke(cli.app, ["trace", "bsa", *words, "--out", str(tmp_path)])


@pytest.mark.parametrize(
    "words",
    [
        "--block-m 16 --seq-blocks 4 --program 1",
        "--block-m 32 --block-n 12 --head 3 --program 2 --dtype fp32 -r",
        "--block-m 16 --seq-blocks 4 --direction backward --dtype fp16 --head 1",
        "--block-m 32 --block-n 24 --direction backward --program 1",
        "--kernel-index 0 --seq-blocks 1",
    ],
)
def test_right_kernels_agree(tmp_path, words):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()[:-1]
    assert len(lines) == (2 if "backward" in words else 3)
    assert all(re.fullmatch(r"✓ .*: \d+ values in [1-9]\d* steps agree", line) for line in lines), outcome.output


def test_the_programs_asked_for_are_traced(tmp_path):
    output = invoke(tmp_path, "--block-m", "16", "--head", "3", "--program", "1").output
    # Each choice has two blocks, and each of them a list, which two heads share.
    assert "bsa_selected_fwd_kernel, program 7, head 3, block 1, 16 entries" in output
    assert "nsa_selected_bwd_queries_kernel, program 1, tokens 16 to 31, rows of all heads" in output
    assert "bsa_norm_fwd_kernel, program 0, token 31, all heads" in output


# A planted bug: module, what is replaced by what, options; what the first line must say, and what must follow from it.
BUGS = {
    "causal": (
        "_device.blocks",
        "o_t - segment.i_key + 1, n_kept",
        "o_t - segment.i_key + 2, n_kept",
        "",
        "step 0, P",
        "the mask: row 0 sees key 1 of this tile",
    ),
    "scale": (
        "bsa.selected.launch",
        '"scale_log2": inputs.scale * LOG2E,',
        '"scale_log2": inputs.scale,',
        "",
        "step 0, P_full",
        "the product of Q and K, or SiLU of it",
    ),
    "entries": (
        "nsa.selected.kernels.index",
        "o_token * SLOTS + o_s, mask=m_e",
        "(o_token ^ 1) * SLOTS + o_s, mask=m_e",
        "",
        "step 0, Q",
        "or the entries of the list",
    ),
    "head": (
        "bsa.selected.kernels",
        "segment_rows(k, segment, i_h)",
        "segment_rows(k, segment, segment.i_h)",
        "--head 1",
        "K",
        "the load of K",
    ),
    "slots": (
        "nsa.selected.kernels.bwd",
        "acc += tl.where(present[:, None]",
        "acc = tl.where(present[:, None]",
        "--program 1",
        "slot 1, O",
        "the sum over slots",
    ),
    "mean": (
        "bsa.combine.kernels",
        "b_x - token_sum(b_x) / N",
        "b_x",
        "--program 1",
        "step 0, Y_slc",
        "the mean or the deviation of the selected branch",
    ),
    "u": ("bsa.combine.kernels", "(b_u * acc)", "acc", "", "O_final", "the product of u and the sum of the branches"),
    "slope": (
        "_device.scores",
        "(ratio - ratio * b_sigmoid)",
        "(ratio + ratio * b_sigmoid)",
        "--direction backward",
        "step 0, slope",
        "the slope of SiLU",
    ),
    "dK": (
        "bsa.selected.kernels",
        "tl.trans(b_ds), b_q, acc_dk, input",
        "tl.trans(b_ds), b_q, input",
        "--direction backward",
        "step 1, dK",
        "the product of dS and Q",
    ),
    "dV": (
        "bsa.selected.kernels",
        "b_p = tl.where(m_keep, b_p, 0.0).to",
        "b_p = b_p.to",
        "--direction backward",
        "step 0, P",
        "the mask: row 0 sees",
    ),
    "base": (
        "nsa.selected.kernels.bwd",
        "if base is not None:",
        "if False:",
        "--direction backward",
        "dQ_base",
        "what the other branches left of dQ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_bug_is_found_where_it_is(tmp_path, bug):
    module, old, new, options, place, follows = BUGS[bug]
    words = ["bsa", "--block-m", "16", *options.split(), "--out", str(tmp_path)]
    arguments = [sys.executable, str(HERE / "planted.py"), module, old, new, *words]
    outcome = subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    firsts = re.findall(r"first mismatch: (.*)\[", outcome.stdout)
    assert place in firsts, outcome.stdout + outcome.stderr
    assert follows in outcome.stdout, outcome.stdout


@pytest.mark.parametrize("interleave", [True, False])
def test_lists_that_are_divided_and_ragged_ends(monkeypatch, interleave):
    monkeypatch.setattr(configs, "SEGMENT", 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, u, do, base = (torch.randn(1, 29, 2, 16, generator=generator) for _ in range(6))
    gates = tuple(torch.rand(1, 29, 2, generator=generator) for _ in range(2))
    case = Case(q, k, v, u, gates, Options(2, 12, 0, 0.25, interleave), 16)
    segments = case.segments()
    number = next(i for i in range(1, len(segments)) if segments[i].block == segments[i - 1].block)
    traces = bsa_programs.trace_forward(case, 0, number, 0) + bsa_programs.trace_backward(case, do, base, 0, number, 0)
    for traced in traces:
        lines, agrees = command.verdict(traced, float(torch.finfo(torch.float32).eps))
        assert agrees, lines
        assert set(traced.kernel) == set(traced.simulation)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--order lists", "--order means nothing to bsa"),
        ("--causal", "--causal means nothing to bsa"),
        ("--warp 0", "--warp means nothing to bsa"),
        ("--impl a.py:f", "--impl means nothing to bsa"),
        ("--block-m 16 --head 4", "there is no head 4: expected 0 to 3"),
        ("--block-m 16 --program 2", "head 0 has 2 programs: expected --program 0 to 1"),
        ("--block-m 24", "expected a power of two"),
        ("--block-n 0", "expected a block of at least 1 key"),
        ("--block-n 4001", "take a multiple of 16"),
        ("--kernel-index 999", "there is no configuration 999"),
        ("--kernel-index 1 --block-m 32", "give one of them"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, words, message):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 2, outcome.output
    assert message in " ".join(outcome.output.split())


def test_without_taps_interpretation_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "interpreting", lambda: False)
    outcome = invoke(tmp_path)
    assert outcome.exit_code == 2
    assert "the kernels of bsa have no taps, so they are traced in Triton's interpreter alone" in " ".join(
        outcome.output.split()
    )


def test_what_is_written(tmp_path):
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    from pages import Balanced

    page = tmp_path / "trace.html"
    outcome = invoke(tmp_path, "--block-m", "16", "--html", str(page))
    assert outcome.exit_code == 0, outcome.output
    simulation, kernel = ((tmp_path / name).read_text().splitlines() for name in ("debug_pt.txt", "debug_kernel.txt"))
    headings = [line for line in simulation if line.startswith(("==", "--", "####"))]
    assert headings == [line for line in kernel if line.startswith(("==", "--", "####"))]
    names = [line.split()[1] for line in headings if line.startswith("==")]
    assert names[:7] == ["steps", "K", "V", "Q_0", "P_full_0", "P_0", "O_0"]
    assert names[-5:] == ["Y_0", "U_0", "O_final", "O_full", "O_ref"]
    arrays = np.load(tmp_path / "trace.npz")
    final, full = (
        next(arrays[key] for key in arrays if key.startswith("kernel/norm: ") and key.endswith(end))
        for end in ("/O_final", "/O_full")
    )
    np.testing.assert_allclose(final, full, atol=5e-2)
    text = Balanced(page.read_text(encoding="utf-8")).text
    assert all(
        words in text
        for words in ("tiles 16 rows × blocks of 16 keys", "4, of which each two share a choice", "Step 0", "Slot 1")
    )
