"""The kernels for Hopper, simulated: every value agrees in every configuration, and of each planted bug the right value
is found; anybody's kernel in Gluon is traced too, up to the fault that ends it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.workbench.flash.planted import HOPPER
from tilewise.workbench.flash.planted_sync import SYNC

PLANTED = Path(__file__).parent / "planted.py"
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gluon_kernel.py"
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")
WIDE = ["--direction", "backward", "--kernel-index", "bwd-bf16-d192-dv192-64x64-s3-fixed"]
BUGS = {bug.name: bug for bug in (*HOPPER, *SYNC)}


def numbered(words):
    """With a configuration's number in place of its name."""
    names = [entry.short for entry in workbench.find("flash-hopper").load("configs").entries()]
    return [str(names.index(word)) if word in names else word for word in words]


def trace(tmp_path, *words):
    outcome = CliRunner().invoke(cli.app, ["trace", *numbered(words), "--out", str(tmp_path)])
    return outcome.exit_code, outcome.output


def agreeing(output):
    """Of each line of a kernel that agrees, the number of values."""
    return [int(count) for count in re.findall(r"✓ flash_\w+_hopper_kernel.*: (\d+) values in", output)]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        # Of three steps and two, in which the rescale is missing of the first; LSE, Q and O_final.
        ([], [29, 29, 29]),
        (["--causal", "--program", "1", "--dtype", "fp16"], [20, 29, 29]),
        # Nine values of each of four visits; K, V, dK_final and dV_final.
        (["--direction", "backward", "--causal", "--seq-blocks", "4", "--program", "1"], [40, 40]),
        # In pieces of 64 channels: of three steps, as above.
        (["--kernel-index", "fwd-bf16-d192-dv192-128x64-g2-s2", "--seq-blocks", "1"], [20, 20]),
        # Of warpgroups that share the keys: six values of each of six visits, and five; K and dK_final, V and dV_final.
        ([*WIDE, "--causal", "--seq-blocks", "4", "--program", "1"], [38, 32]),
    ],
)
def test_every_value_agrees(tmp_path, words, counts):
    code, output = trace(tmp_path, "flash-hopper", *words)
    assert code == 0, output
    assert agreeing(output) == counts


@pytest.mark.parametrize(
    "causal", [pytest.param(False, marks=pytest.mark.nightly), pytest.param(True, marks=pytest.mark.slow)]
)
def test_in_every_configuration(tmp_path, causal):
    table = workbench.find("flash-hopper").load("configs").entries()
    for number, entry in enumerate(table):
        backward = entry.short.startswith("bwd")
        words = ["--kernel-index", str(number), "--direction", "backward" if backward else "forward"]
        code, output = trace(tmp_path, "flash-hopper", *words, "--seq-blocks", "3", *["--causal"] * causal)
        assert code == 0, f"{entry.short}: {output}"
        # A warpgroup may have no rows of three tiles under the mask; none is left out.
        assert len(agreeing(output)) == (2 if backward else entry.config.groups)


@pytest.mark.parametrize(
    ("bug", "words", "place"),
    [
        ("hopper-forgotten-rescale", [], "block 1, O_scale"),
        pytest.param("hopper-rows-of-first", ["--causal"], "block 0, S", marks=pytest.mark.slow),
        pytest.param("hopper-other-values", [], "block 0, V", marks=pytest.mark.slow),
        pytest.param("hopper-lse-in-log2", [], "LSE", marks=pytest.mark.slow),
        pytest.param("hopper-delta-dropped", ["--direction", "backward"], "visit 0, dS", marks=pytest.mark.slow),
        pytest.param(
            "hopper-causal-long", ["--direction", "backward", "--causal"], "visit 0, P", marks=pytest.mark.slow
        ),
        pytest.param("hopper-columns-swapped", ["--direction", "backward"], "visit 0, dQ_part", marks=pytest.mark.slow),
        pytest.param("hopper-wide-delta-dropped", WIDE, "visit 0, dS", marks=pytest.mark.slow),
        pytest.param("hopper-dk-unscaled", ["--direction", "backward"], "dK_final", marks=pytest.mark.slow),
        pytest.param("hopper-dq-unscaled", ["--direction", "backward"], "dQ_final", marks=pytest.mark.slow),
    ],
)
def test_each_planted_bug_is_found_where_it_is(tmp_path, bug, words, place):
    output = traced_with(BUGS[bug], tmp_path, words)
    assert place in re.findall(r"first mismatch: (.*)\[", output), output


def traced_with(bug, tmp_path, words):
    command = [sys.executable, str(PLANTED), bug.module, bug.old, bug.new, "flash-hopper", "--out", str(tmp_path)]
    outcome = subprocess.run(
        [*command, *numbered(words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    return outcome.stdout


@pytest.mark.slow
def test_a_fault_is_shown_where_the_values_end(tmp_path):
    # More steps than buffers.
    output = traced_with(BUGS["sync-released-early"], tmp_path, ["--seq-blocks", "4"])
    assert re.search(r"values agree, until overwritten: buffer \d", output), output


def test_a_kernel_of_ones_own(tmp_path):
    code, output = trace(tmp_path, "flash", "--impl", f"{EXAMPLE}:attention", "--block-m", "70")
    assert code == 0, output
    assert "rows 0 to 63: 26 values in 3 steps agree" in output
    code, output = trace(tmp_path, "flash", "--impl", f"{EXAMPLE}:forgets_to_rescale")
    assert code == 1
    assert "first mismatch: block 1, O[" in output
    assert "the rescale of O is missing" in output
    code, output = trace(tmp_path, "flash", "--impl", f"{EXAMPLE}:releases_early", "--block-m", "100")
    assert code == 1
    assert "14 values agree, until overwritten: buffer 0" in output
    code, output = trace(tmp_path, "flash", "--impl", f"{EXAMPLE}:waits_for_the_wrong_phase")
    assert code == 1
    assert "✗ deadlock: nobody can go on" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flash-hopper", "--dtype", "fp32"], "these kernels take fp16 and bf16"),
        (["flash-hopper", "--program", "9"], "--program 9: expected 0 to 3"),
        (["flash-hopper", "--head", "1"], "--head means nothing to flash-hopper"),
        (["flash-hopper", "--kernel-index", "0", "--direction", "backward"], "it does not fit --direction backward"),
        (["flash", "--impl", f"{EXAMPLE}:attention", "--causal"], "has no parameter causal: trace it without"),
    ],
)
def test_wrong_usage_exits_with_2(tmp_path, words, message):
    code, output = trace(tmp_path, *words)
    assert code == 2
    assert message in " ".join(output.split())
