"""trace of native sparse attention's branches: nothing where nothing is wrong, and of each planted bug the right value
in the right step.
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
from tilewise.ops.nsa import configs
from tilewise.trace import command
from tilewise.workbench.nsa import programs as nsa_programs
from tilewise.workbench.nsa.base import block_pattern
from tilewise.workbench.nsa.programs import Case, Numbers

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")


def invoke(tmp_path, *words):
    return CliRunner().invoke(cli.app, ["trace", *words, "--out", str(tmp_path)])


def said(outcome):
    return " ".join(outcome.output.split())


@pytest.mark.parametrize(
    "words",
    [
        "nsa-selected",
        "nsa-selected --order union --program 1",
        "nsa-selected --order lists --program 3 --head 1 --block-m 32 --block-n 24 --seq-blocks 5 --dtype fp32",
        "nsa-selected --order union --block-m 32 --block-n 8 --seq-blocks 3 --dtype fp16 -r",
        "nsa-selected --direction backward --block-m 32 --seq-blocks 4 --program 1",
        "nsa-selected --direction backward --order union --head 1 --program 1 --block-m 32 --dtype fp32",
        "nsa-compressed --block-m 32 --warp 1",
        "nsa-compressed --program 1 --head 1 --dtype fp32 -r",
        "nsa-compressed --direction backward --program 1",
        f"nsa-compressed --block-m 40 --impl {HERE / 'windows.py'}:right",
    ],
)
def test_right_kernels_agree(tmp_path, words):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.splitlines()[:-1]
    assert lines
    assert all(re.fullmatch(r"✓ .*: \d+ values in [1-9]\d* steps agree", line) for line in lines), outcome.output


def test_the_programs_asked_for_are_traced(tmp_path):
    lists = invoke(tmp_path, "nsa-selected", "--head", "1", "--program", "2").output
    # Each KV head has four blocks, and each of them a list.
    assert "nsa_selected_fwd_lists_kernel, program 6, KV head 1, block 2, " in lists
    assert "nsa_selected_fwd_merge_kernel, program 2, tokens 32 to 47, rows of all heads" in lists
    union = invoke(
        tmp_path, "nsa-selected", "--head", "1", "--program", "1", "--direction", "backward", "--order", "union"
    ).output
    assert "nsa_selected_bwd_union_kernel, program 3, KV head 1, tokens 32 to 63" in union
    assert "nsa_selected_bwd_lists_kernel, program 5, KV head 1, block 1, " in union


# A planted bug: module, what is replaced by what, options; what the first line must say, and what must follow from it.
BUGS = {
    "causal": (
        "_device.blocks",
        "o_t - segment.i_key + 1, n_kept",
        "o_t - segment.i_key + 2, n_kept",
        "",
        "step 0, S",
        "the mask: row 0 sees key",
    ),
    "scale": (
        "nsa.selected.kernels.fwd",
        "m = tl.max(b_s, 1) * scale_log2",
        "m = tl.max(b_s, 1)",
        "",
        "step 0, M",
        "times what it should be",
    ),
    "entries": (
        "nsa.selected.kernels.index",
        "o_token * SLOTS + o_s, mask=m_e",
        "(o_token ^ 1) * SLOTS + o_s, mask=m_e",
        "",
        "step 0, Q",
        "or the entries of the list",
    ),
    "segment": (
        "nsa.selected.kernels.index",
        "SEGMENT, SEGMENT))",
        "SEGMENT, SEGMENT) // 2)",
        "--block-m 32 --seq-blocks 4",
        "steps",
        "entries the list",
    ),
    "weight": (
        "nsa.selected.kernels.fwd",
        "tl.exp2(b_one - total)",
        "tl.exp2(b_one - m)",
        "--program 1",
        "slot 0, W",
        "the weight of a slot",
    ),
    "rescale": (
        "nsa.selected.kernels.fwd",
        "acc * rescale[:, None], input_precision",
        "acc, input_precision",
        "--order union",
        "block 1, O",
        "the rescale of O is missing",
    ),
    "named": (
        "nsa.selected.kernels.fwd",
        'tl.where(named, shift, float("inf"))',
        "shift",
        "--order union",
        "block 0, P",
        "the mask: row",
    ),
    "union": (
        "nsa.selected.kernels.index",
        "(n_union - tl.cumsum(ends.to(tl.int32), 0))",
        "(tl.cumsum(ends.to(tl.int32), 0) - 1)",
        "--order union",
        "block 0, K",
        "which block the list or the union holds",
    ),
    "dS": (
        "nsa.selected.kernels.bwd",
        "b_p * (b_dp - b_delta[:, None])",
        "b_p * b_dp",
        "--order union --direction backward",
        "block 0, dS",
        "delta is not subtracted",
    ),
    "dK": (
        "nsa.selected.kernels.bwd",
        "tl.trans(b_ds), b_q, acc_dk, input",
        "tl.trans(b_ds), b_q, input",
        "--direction backward --block-m 32 --seq-blocks 4",
        "step 1, dK",
        "the product of dS and Q",
    ),
    "slots": (
        "nsa.selected.kernels.bwd",
        "acc += tl.where(present[:, None]",
        "acc = tl.where(present[:, None]",
        "--direction backward",
        "slot 1, dQ",
        "computed at line",
    ),
    "windows": (
        "_device.scores",
        "o_n = o_n * KEY_STRIDE",
        "o_n = o_n * KEY_STRIDE - 1",
        "nsa-compressed --program 1",
        "block 0, S",
        "the mask: row 6 sees key 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_bug_is_found_where_it_is(tmp_path, bug):
    module, old, new, options, place, follows = BUGS[bug]
    words = options.split() if options.startswith("nsa") else ["nsa-selected", *options.split()]
    arguments = [sys.executable, str(HERE / "planted.py"), module, old, new, *words, "--out", str(tmp_path)]
    outcome = subprocess.run(
        arguments, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    firsts = re.findall(r"first mismatch: (.*)\[", outcome.stdout)
    assert place in firsts, outcome.stdout + outcome.stderr
    assert follows in outcome.stdout, outcome.stdout


def test_a_function_that_sees_windows_too_early(tmp_path):
    outcome = invoke(
        tmp_path, "nsa-compressed", "--block-m", "40", "--impl", f"{HERE / 'windows.py'}:early", "--dtype", "fp32"
    )
    assert outcome.exit_code == 1, outcome.output
    assert "the mask: row" in outcome.output


def make(tokens, group, block_m, block_size, pattern, dtype):
    generator = torch.Generator().manual_seed(0)
    q, do = (torch.randn(1, tokens, 2 * group, 16, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, tokens, 2, 16, generator=generator).to(dtype) for _ in range(2))
    return Case(q, k, v, block_pattern(pattern, (1, tokens, 2, 3), block_size, generator), block_m, block_size), do


def assert_agree(traces, dtype):
    for traced in traces:
        lines, agrees = command.verdict(traced, float(torch.finfo(dtype).eps))
        assert agrees, lines
        assert set(traced.kernel) == set(traced.simulation)


@pytest.mark.parametrize("pattern", ["repeats", "holes"])
def test_groups_that_are_no_power_of_two_and_ragged_ends(pattern):
    case, do = make(29, 3, 32, 12, pattern, torch.float32)
    traces = nsa_programs.trace_forward_lists(case, Numbers(2, 1))
    # The last tile has 5 of 8 tokens.
    traces += [nsa_programs.trace_forward_union(case, 3)]
    traces += nsa_programs.trace_backward(case, do, "lists", Numbers(1, 0))
    traces += nsa_programs.trace_backward(case, do, "union", Numbers(0, 7))
    assert_agree(traces, torch.float32)
    assert traces[2].kernel["O_final"].shape == (15, 16)


def test_lists_that_are_divided(monkeypatch):
    monkeypatch.setattr(configs, "SEGMENT_ENTRIES", dict.fromkeys(configs.SEGMENT_ENTRIES, (4, 4)))
    case, do = make(24, 2, 16, 16, "repeats", torch.bfloat16)
    segments = case.segments("backward", "lists")
    number = next(i for i in range(1, len(segments)) if segments[i].block == segments[i - 1].block)
    assert_agree(
        [
            *nsa_programs.trace_forward_lists(case, Numbers(number, 0)),
            *nsa_programs.trace_backward(case, do, "lists", Numbers(number, 0)),
        ],
        torch.bfloat16,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nsa-selected --order sideways", "expected lists or union"),
        ("nsa-selected --causal", "--causal means nothing to nsa-selected"),
        ("nsa-selected --warp 0", "--warp means nothing to nsa-selected"),
        ("nsa-selected --impl a.py:f", "--impl means nothing to nsa-selected"),
        ("nsa-selected --head 2", "there is no KV head 2: expected 0 to 1"),
        ("nsa-selected --program 4", "KV head 0 has 4 programs in this order: expected --program 0 to 3"),
        ("nsa-selected --program 2 --order union", "has 2 programs in this order"),
        ("nsa-selected --block-m 24", "expected a power of two"),
        ("nsa-selected --block-n 0", "expected a block of at least 1 key"),
        ("nsa-selected --block-m 128 --order union", "take a smaller --block-m"),
        ("nsa-selected --kernel-index 999", "there is no configuration 999"),
        ("nsa-selected --kernel-index 1 --block-m 32", "give one of them"),
        ("nsa-compressed --order lists", "--order means nothing to nsa-compressed"),
        ("nsa-compressed --program 2 --head 1", "together below 4"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, words, message):
    outcome = invoke(tmp_path, *words.split())
    assert outcome.exit_code == 2, outcome.output
    assert message in said(outcome)


def test_without_taps_interpretation_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "interpreting", lambda: False)
    outcome = invoke(tmp_path, "nsa-selected")
    assert outcome.exit_code == 2
    assert (
        "the kernels of nsa-selected have no taps, so they are traced in Triton's interpreter alone: set"
        " TRITON_INTERPRET=1" in said(outcome)
    )


def test_what_is_written(tmp_path):
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    from pages import Balanced

    page = tmp_path / "trace.html"
    outcome = invoke(tmp_path, "nsa-selected", "--block-m", "32", "--html", str(page))
    assert outcome.exit_code == 0, outcome.output
    simulation, kernel = ((tmp_path / name).read_text().splitlines() for name in ("debug_pt.txt", "debug_kernel.txt"))
    headings = [line for line in simulation if line.startswith(("==", "--", "####"))]
    assert headings == [line for line in kernel if line.startswith(("==", "--", "####"))]
    names = [line.split()[1] for line in headings if line.startswith("==")]
    assert names[:9] == ["steps", "K", "V", "Q_0", "S_0", "M_0", "P_0", "L_0", "O_0"]
    assert names[-7:] == ["O_part_2", "W_2", "O_2", "O_final", "LSE", "O_full", "O_ref"]
    arrays = np.load(tmp_path / "trace.npz")
    final, full = (
        next(arrays[key] for key in arrays if key.startswith("kernel/merge: ") and key.endswith(end))
        for end in ("/O_final", "/O_full")
    )
    np.testing.assert_allclose(final, full, atol=2e-2)
    text = Balanced(page.read_text(encoding="utf-8")).text
    assert all(
        words in text for words in ("order by keys (lists)", "tiles 32 rows × blocks of 16 keys", "Step 0", "Slot 2")
    )
