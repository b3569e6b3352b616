"""Compiles launches for any GPU on a machine that has none, through Triton's ordinary path, and reads off what they use."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise.ops._host.launching import Launch


@dataclass(frozen=True)
class Compiled:
    """One kernel as compiled for one architecture: registers a thread, spilt bytes, shared memory in bytes, and how it multiplies."""

    name: str
    architecture: int
    registers: int
    spilled: int
    shared_memory: int
    wgmma: bool
    wgmma_serialised: bool
    ptx: str


class _NoDriver:
    """Stands in for a CUDA driver: tells Triton which GPU to compile for, and nothing else."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launch(launch: Launch, architecture: int) -> Compiled:
    """Compile a launch (its tensors may be on the `meta` device) for an architecture, 90 for an H100. Needs a process that does not interpret."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("this process interprets kernels (TRITON_INTERPRET=1): compile in one where that is unset")
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver(architecture))
    try:
        kernel = launch.kernel.warmup(grid=(1,), **launch.arguments)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
    finally:
        triton.runtime.driver._active = active
    ptx = kernel.asm["ptx"]
    report = _assemble(ptx, architecture)
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas said nothing of registers for {launch.kernel.__name__} on sm_{architecture}: {report.strip()}")
    return Compiled(
        name=launch.kernel.__name__,
        architecture=architecture,
        registers=int(registers[1]),
        spilled=int(spilled[1]),
        shared_memory=kernel.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        wgmma_serialised="wgmma" in report and "serialized" in report,
        ptx=ptx,
    )


def _assemble(ptx: str, architecture: int) -> str:
    """What ptxas says of registers, spills and serialised wgmma."""
    from triton.backends.nvidia import compiler

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [compiler.get_ptxas(architecture).path, "-v", f"--gpu-name={compiler.sm_arch_from_capability(architecture)}", str(source)]
        result = subprocess.run([*command, "-o", str(Path(folder, "kernel.cubin"))], capture_output=True, text=True)
    return result.stdout + result.stderr
