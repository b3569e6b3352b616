"""Runs a script that compiles kernels without a GPU, in a process of its own, for the tests' process interprets
kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tilewise.inspect.facts import CARDS

# Takes which launches of tilewise.inspect, such as flash:launches, architecture and dtype, and what else they want.
SCRIPT = Path(__file__).with_name("compile_launches.py")


def run_compiling(script: Path, *arguments: Any) -> Any:
    """What `script ARGUMENTS...` prints as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": ":".join(sys.path)
    }
    result = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def compiled(script: Path, *arguments: Any) -> list[dict[str, Any]]:
    """One entry a kernel; each must fit the architecture's shared memory."""
    kernels = run_compiling(script, *arguments)
    for kernel in kernels:
        assert kernel["shared_memory"] <= CARDS[kernel["architecture"]].shared_memory, kernel
    return kernels
