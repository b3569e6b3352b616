"""Attention over a cache, split by split: its simulation against the reference, kernels against it, planted bugs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.ops._host.backend import interpreting
from tilewise.ops.flash.decode import simulate
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.flash.simulate import Options

PLANTED = Path(__file__).parent / "planted.py"
interpreted = pytest.mark.skipif(not interpreting(), reason="its kernels have no taps")


def trace(folder, *words):
    outcome = CliRunner().invoke(cli.app, ["trace", "flash-decode", "--out", str(folder), *words])
    return outcome.exit_code, outcome.output


@pytest.mark.parametrize("options", [Options(0.25), Options(0.25, right=0), Options(-0.3, left=40, right=0)])
@pytest.mark.parametrize("given", [1, 3])
def test_the_simulated_splits_make_the_reference(options, given):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 16, dtype=torch.float64, generator=generator) for n, h in ((3, 2), (150, 1), (150, 1)))
    splits = simulate.split_keys(150, given, 32)
    parts = [dict(simulate.split(q, k[:, 0], v[:, 0], i, splits, 32, options)) for i in range(splits.number)]
    assert splits.number == given
    left, right = (-1 if limit is None else limit for limit in (options.left, options.right))
    window = {"window_size": (left, right), "scale": options.scale}
    o, lse = (x[0] for x in flash_attention(q[None], k[None], v[None], **window))
    for row in range(6):
        outputs, lses = (torch.stack([part[name][row] for part in parts]) for name in ("O_final", "LSE"))
        merged = dict(simulate.merge(outputs, lses, 2))
        torch.testing.assert_close(merged["O_final"], o[row // 2, row % 2])
        torch.testing.assert_close(merged["LSE"][0], lse[row % 2, row // 2])


@interpreted
@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), ("18 values in 2 steps", "7 values in 1 steps")),
        (
            ("--causal", "--head", "1", "--program", "2", "--seq-blocks", "3", "--dtype", "fp32"),
            ("19 values", "7 values"),
        ),
        pytest.param(
            ("--seq-blocks", "17", "--block-n", "16", "--block-m", "32"),
            ("18 values", "11 values in 2 steps"),
            marks=pytest.mark.slow,
        ),
        (("--seq-blocks", "1", "--block-n", "64"), ("19 values in 2 steps",)),
        (("--kernel-index", "2"), ("18 values in 2 steps", "7 values")),
    ],
)
def test_the_kernels_agree_with_the_simulation(tmp_path, words, values):
    code, output = trace(tmp_path, *words)
    assert code == 0, output
    found = [line for line in output.splitlines() if line.startswith("✓")]
    assert len(found) == len(values)
    assert all(value in line for value, line in zip(values, found, strict=True)), output


# Words of the request, and the first mismatches.
BUGS = {
    "split-long": ((), ("steps[0]", "round 0, LSE_part[0]")),
    "second-page-again": (("--block-n", "64"), ("block 0, K[",)),
    "merge-unscaled": ((), ("round 0, W[1]",)),
    "group-mixed": ((), ("Q[3,",)),
    "forgotten-rescale": ((), ("block 1, O[",)),
    "sees-next": (("--causal", "--program", "1"), ("block 1, S[",)),
}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_where_it_is(tmp_path, name):
    words, places = BUGS[name]
    bug = next(bug for bug in workbench.find("flash-decode").load("suite").mutants if bug.name == name)
    command = [
        sys.executable,
        str(PLANTED),
        bug.module,
        bug.old,
        bug.new,
        "flash-decode",
        "--out",
        str(tmp_path),
        *words,
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert outcome.returncode == 1, outcome.stderr
    for place in places:
        assert f"first mismatch: {place}" in outcome.stdout, outcome.stdout


@interpreted
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--direction", "backward"), "flash-decode has no backward"),
        (("--program", "2"), "there are 2 KV heads of 2 splits each"),
        (("--head", "2"), "expected --head 0 to 1 and --program 0 to 1"),
        (("--block-n", "24"), "expected a power of two of at least 16"),
        (("--order", "lists"), "--order means nothing to flash-decode"),
    ],
)
def test_wrong_usage(tmp_path, words, message):
    code, output = trace(tmp_path, *words)
    assert code == 2
    assert message in " ".join(output.split())
