"""The scripts whole, at their shortest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def run(script, *words):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCHMARKS / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_host_times(tmp_path):
    source = str(BENCHMARKS.parent / "src")
    words = ["--only", "flash", "hstu", "bsa", "nsa", "--rounds", "2", "--calls", "2", "--compare", source]
    run("host.py", *words, "--json", str(tmp_path / "host.json"))
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    assert len(rows) == 14
    for row in rows:
        for times in row["microseconds"].values():
            assert all(0 < one["host"] <= one["whole"] for one in times.values())


def test_cold_starts(tmp_path):
    run("cold.py", "--only", "hstu", "--json", str(tmp_path / "cold.json"))
    (row,) = json.loads((tmp_path / "cold.json").read_text())["rows"]
    assert row["variants"] > 0
    assert row["compiled_with_a_full_cache"] == 0
    assert row["slowest"]["seconds"] > 0
    assert row["full"]["step"] < row["cold"]["step"]
