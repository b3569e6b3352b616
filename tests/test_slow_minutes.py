"""Slow tests that get no turn are skipped and say so; others always run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SLOW = "tests/verify/test_nsa_suites.py::test_given_blocks_must_come_back"
QUICK = "tests/test_sizes.py::test_kernel_names_are_unique_and_open_with_their_plan"


def test_what_has_not_begun_in_time_is_skipped():
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--slow-minutes", "0", SLOW, QUICK]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the 0 minutes for slow tests are over" in result.stdout
    assert "1 passed, 1 skipped" in result.stdout
