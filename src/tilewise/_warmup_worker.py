"""A process that compiles what an operator launches, into Triton's cache: `python -m tilewise._warmup_worker`, which
`tilewise.warmup` starts.

It reads the request, a line of JSON, and answers line by line. It ends with the process that started it. No GPU is
used: a stand-in for the driver tells Triton which architecture to compile for, so the cache's keys are those of a call
on such a GPU. Several of these processes share the work by the lock files of `tilewise.ops._host.compiling`.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia

from tilewise import workbench
from tilewise.inspect.compile import without_driver
from tilewise.ops._host import compiling, start
from tilewise.ops._host.launching import Launch, capture
from tilewise.verify.single import DTYPES
from tilewise.verify.suite import NAMED, Case, Suite
from tilewise.workbench.operator import UsageError


def cases(operator: str, shapes: Sequence[str]) -> list[Case]:
    """The requested cases, by name or written out; else the standard set that `tilewise bench` times, or verify's sizes
    if it has none.
    """
    found = workbench.find(operator)
    suite: Suite = found.load("suite")
    standard: tuple[Case, ...] = found.load("bench").gpu_cases if found.has("bench") else ()
    named = {case.name: case for case in standard}
    try:
        if shapes:
            return [named.get(shape) or suite.find(shape) for shape in shapes]
    except ValueError as error:
        raise UsageError(str(error)) from None
    return list(standard) or [case for case in suite.cases if case.name in NAMED]


def launches(operator: str, case: Case, dtype: torch.dtype, architecture: int, forward_only: bool) -> list[Launch]:
    """What the operator launches for a case, and its backward for a gradient that is contiguous."""
    problem = case.problem

    def fill(_name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    # Only shapes, strides and dtypes are kept, not values.
    tensors = {name: _without_data(x) for name, x in problem.tensors(fill).items()}
    forward_only = forward_only or not problem.differentiable
    leaves = [x.requires_grad_(not forward_only) for x in tensors.values() if x.is_floating_point()]
    with capture(architecture) as found:
        results = workbench.find(operator).load("function")(**problem.arguments(tensors), **problem.options())
        output = results[0] if isinstance(results, tuple) else results
        if not forward_only:
            torch.autograd.grad(
                output, leaves, torch.empty_like(output, memory_format=torch.contiguous_format), allow_unused=True
            )
    return [launch for launch in found if launch.grid]


def _without_data(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _end_with_the_parent() -> None:
    """The process that started this one holds the other end of standard input."""
    sys.stdin.read()
    os._exit(1)


def serve(request: dict[str, Any], answer: Any) -> None:
    """Compile, with an answer for each kernel."""
    architecture = request["architecture"]
    tasks: dict[str, compiling.Task] = {}
    names: dict[str, str] = {}
    for operator in request["operators"]:
        for dtype in request["dtypes"]:
            for case in cases(operator, request["shapes"]):
                for launch in launches(operator, case, DTYPES[dtype], architecture, request["forward_only"]):
                    (task,) = start.tasks([launch])
                    tasks.setdefault(task.name, task)
                    names.setdefault(task.name, launch.kernel.__name__)
    answer({"found": len(tasks)})
    if start.builds_launchers():
        try:
            nvidia.libcuda_dirs()
        except Exception:
            answer(
                {
                    "note": (
                        "libcuda.so.1 was not found: Triton 3.6 builds a C launcher for each kernel at its first launch"
                    )
                }
            )
    with contextlib.suppress(Exception):
        # What Triton builds with a C compiler in every process, for any kernel.
        nvidia.CudaUtils()
    compiled = threading.local()

    def listen(*, cache_hit: bool, **_: Any) -> None:
        compiled.here = not cache_hit

    def done(task: compiling.Task, error: Exception | None) -> None:
        said = "" if error is None else f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        answer(
            {"done": task.name, "kernel": names[task.name], "compiled": getattr(compiled, "here", False), "error": said}
        )
        compiled.here = False

    triton.knobs.compilation.listener = listen
    with without_driver(architecture):
        compiling.compile_all(list(tasks.values()), done)


def main() -> None:
    """Answer on the original standard output; what anything else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def answer(document: Any) -> None:
        with lock:
            answers.write(json.dumps(document) + "\n")
            answers.flush()

    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    try:
        serve(request, answer)
    except UsageError as error:
        answer({"usage": str(error)})
    answer({"end": True})
    # The thread that waits for the parent holds standard input.
    os._exit(0)


if __name__ == "__main__":
    main()
