"""Runs a script that compiles kernels without a GPU, in a process of its own, for the tests' process interprets kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tilewise.ops.flash.configs import SHARED_MEMORY, family


def compiled(script: Path, architecture: int, *arguments: Any) -> list[dict[str, Any]]:
    """What `script ARCHITECTURE ARGUMENTS...` prints as JSON, one entry a kernel; each must fit the architecture's shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run([sys.executable, str(script), str(architecture), *map(str, arguments)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    kernels = json.loads(result.stdout)
    for kernel in kernels:
        assert kernel["shared_memory"] <= SHARED_MEMORY[family(architecture)], kernel
    return kernels
