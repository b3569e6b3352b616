"""`tilewise.warmup`: compile ahead of time, into Triton's own cache, with or without a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.ops._host.backend import VARIABLE, jobs

# Kernels that a process compiles at a time: Triton holds the GIL for a fifth of a compilation, so one process fills
# about five cores.
JOBS_EACH = 4
DTYPES = ("bf16", "fp16", "fp32")


@dataclass
class Warmed:
    """What a warm-up did: the number of kernels, how many of them were compiled rather than found in the cache, and
    failures by kernel.
    """

    kernels: int = 0
    compiled: int = 0
    seconds: float = 0.0
    errors: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def warmup(
    *operators: str,
    shapes: Sequence[str] = (),
    dtypes: Sequence[str] = ("bf16",),
    arch: str | None = None,
    forward_only: bool = False,
    advanced: Callable[[int, int], None] | None = None,
) -> Warmed:
    """Compile what operators launch for given problems, so that a first call finds every kernel in Triton's cache.

    Args:
        operators: `flash`, `nsa`, `hstu`, `bsa`, ..., as `tilewise verify --list` names them.
        shapes: problems, each a case's name or written out, such as `B=1,T=4096,H=16,Hk=4,D=128,causal`; by default the
            operator's standard cases.
        dtypes: some of `bf16`, `fp16` and `fp32`.
        arch: such as `sm_90`; by default that of the current GPU. No GPU is needed where it is given.
        forward_only: leave the backward out.
        advanced: called with how many kernels are done, and how many there are.

    Kernels are compiled by separate processes, in parallel (TILEWISE_COMPILE_JOBS), into the cache of this user
    (TRITON_CACHE_DIR). They serve the same build of Triton, on the same kind of CPU. docs/launch.md says what makes
    another variant of a kernel.
    """
    if not operators:
        raise ValueError("no operator is named: expected at least one, such as flash")
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown or not dtypes:
        raise ValueError(f"dtypes are {', '.join(dtypes) or 'none'}: expected some of {', '.join(DTYPES)}")
    request = {
        "operators": list(operators),
        "shapes": list(shapes),
        "dtypes": list(dtypes),
        "architecture": _architecture(arch),
        "forward_only": forward_only,
    }
    return _Run(request, advanced or (lambda *_: None)).run()


def _architecture(arch: str | None) -> int:
    if arch is not None:
        number = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", arch)
        if number is None or int(number[1]) < 80:
            raise ValueError(f"arch is {arch!r}: expected sm_80 or newer, such as sm_90")
        return int(number[1])
    import torch

    if not torch.cuda.is_available():
        raise ValueError("there is no GPU here: say which architecture to compile for, such as arch='sm_90'")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


class _Run:
    """Processes that share the kernels, and their answers so far."""

    def __init__(self, request: dict[str, Any], advanced: Callable[[int, int], None]) -> None:
        self._request = request
        self._advanced = advanced
        self._lock = threading.Lock()
        self._done: set[str] = set()
        self._failures: list[str] = []
        self._usage = ""
        self.warmed = Warmed()

    def run(self) -> Warmed:
        began, count = time.monotonic(), jobs()
        # Each takes the kernels that no other process is working on.
        shares = [len(range(i, count, max(1, count // JOBS_EACH))) for i in range(max(1, count // JOBS_EACH))]
        threads = [threading.Thread(target=self._serve, args=(share,), daemon=True) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._usage:
            raise ValueError(self._usage)
        if self._failures and (not self.warmed.kernels or len(self._done) < self.warmed.kernels):
            raise RuntimeError(self._failures[0])
        self.warmed.seconds = time.monotonic() - began
        return self.warmed

    def _serve(self, share: int) -> None:
        """One process, until it ends."""
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The worker can import what this process can, from wherever either is started. It needs no GPU, so it takes no
        # memory there.
        paths = os.pathsep.join(str(Path(place).resolve()) for place in sys.path)
        environment |= {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", VARIABLE: str(share)}
        command = [sys.executable, "-m", "tilewise._warmup_worker"]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
            ended = False
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(self._request) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    said = json.loads(line)
                    ended = ended or "end" in said
                    with self._lock:
                        self._hear(said)
            finally:
                process.kill()
                process.wait()
                if not ended:
                    errors.seek(0)
                    lines = errors.read().strip().splitlines()
                    self._failures.append(f"a compiling process died: {lines[-1] if lines else 'it said nothing'}")

    def _hear(self, said: dict[str, Any]) -> None:
        warmed = self.warmed
        if "usage" in said:
            self._usage = said["usage"]
        elif "note" in said and said["note"] not in warmed.notes:
            warmed.notes.append(said["note"])
        elif "found" in said:
            warmed.kernels = said["found"]
        elif "done" in said:
            self._done.add(said["done"])
            warmed.compiled += said["compiled"]
            if said["error"]:
                warmed.errors[said["kernel"]] = said["error"]
        self._advanced(len(self._done), warmed.kernels)
