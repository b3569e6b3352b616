"""Compiles launches for any GPU on a machine that has none, through Triton's ordinary path, and reads off what they
use.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise.inspect.facts import WARP, Facts
from tilewise.inspect.sass import disassemble, instruction_mix, spills_in_loops
from tilewise.ops._host.launching import Launch


@dataclass(frozen=True)
class Compiled:
    """One kernel as Triton compiled it for one architecture; `log` is what ptxas said, empty where Triton had the
    kernel in its cache.
    """

    kernel: Any
    architecture: int
    log: str

    @property
    def ptx(self) -> str:
        """The kernel as Triton hands it to ptxas."""
        return str(self.kernel.asm["ptx"])

    @property
    def cubin(self) -> bytes:
        """The kernel as a GPU runs it."""
        return bytes(self.kernel.asm["cubin"])

    def _multiplies(self) -> bool:
        """Whether it multiplies matrices.

        Gluon begins with the second of Triton's languages, where the product has the unit's name.
        """
        asm = self.kernel.asm
        return "tt.dot" in asm["ttir"] if "ttir" in asm else "warp_group_dot " in asm["ttgir"]

    def facts(self) -> Facts:
        """What it uses."""
        name, ptx = self.kernel.metadata.name, self.ptx
        spilled = re.search(
            rf"Function properties for {re.escape(name)}\s.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
            self.log,
            re.DOTALL,
        )
        registers = re.search(r"Used (\d+) registers", self.log)
        threads = re.search(r"\.(?:req|max)ntid (\d+)", ptx)
        if spilled is None or registers is None or threads is None:
            raise RuntimeError(
                f"ptxas said nothing of registers for {name} on sm_{self.architecture}: {self.log.strip()}"
            )
        return Facts(
            kernel=name,
            architecture=self.architecture,
            registers=int(registers[1]),
            spill_stores=int(spilled[1]),
            spill_loads=int(spilled[2]),
            shared_memory=self.kernel.metadata.shared,
            tensor_memory=getattr(self.kernel.metadata, "tmem_size", 0) or 0,
            warps=int(threads[1]) // WARP,
            multiplies=self._multiplies(),
            mma="mma.sync" in ptx,
            wgmma="wgmma.mma_async" in ptx,
            wgmma_serialised="wgmma" in self.log and "serialized" in self.log,
            tma="cp.async.bulk.tensor" in ptx,
            tcgen05="tcgen05.mma" in ptx,
            ptxas=ptxas_version(self.architecture),
        )


def ptxas_version(architecture: int) -> str:
    """Of the assembler that Triton takes for an architecture."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    said = get_ptxas_version(architecture)
    version = re.search(r"V([\d.]+)", said)
    return version[1] if version else str(said).strip()


class _NoDriver:
    """Stands in for a CUDA driver: tells Triton which GPU to compile for, and nothing else."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, WARP)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def without_driver(architecture: int) -> Iterator[None]:
    """Inside, Triton takes the GPU to be of this architecture."""
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver(architecture))
    try:
        yield
    finally:
        triton.runtime.driver._active = active


def compile_launch(launch: Launch, architecture: int, always: bool = False) -> Compiled:
    """Compile a launch (its tensors may be on the `meta` device) for an architecture, 90 for an H100. Needs a process
    that does not interpret.

    `always` compiles what Triton has in its cache too, for what ptxas says is not kept there.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("this process interprets kernels (TRITON_INTERPRET=1): compile in one where that is unset")
    said = io.StringIO()
    if always:
        launch.kernel.device_caches.clear()
    with (
        without_driver(architecture),
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
        contextlib.redirect_stdout(said),
    ):
        triton.knobs.nvidia.dump_ptxas_log = True
        if always:
            triton.knobs.compilation.always_compile = True
        kernel = launch.kernel.warmup(grid=(1,), **launch.arguments)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
    if kernel.metadata.target.arch != architecture:
        raise RuntimeError(
            f"this process has compiled for sm_{kernel.metadata.target.arch}: compile for sm_{architecture} in"
            " another one"
        )
    return Compiled(kernel, architecture, said.getvalue())


# Changes whenever Facts, or how they are read, do.
FORMAT = 2


class Inspected(NamedTuple):
    """What a kernel uses; its SASS, "" where nobody asked; and why there is neither SASS nor an instruction mix, ""
    where there is.
    """

    facts: Facts
    sass: str = ""
    trouble: str = ""


def inspect_launch(launch: Launch, architecture: int, mix: bool, sass: bool) -> Inspected:
    """What a launch's kernel uses, with its instruction mix or its SASS where they are asked for."""
    compiled = compile_launch(launch, architecture)
    path = _path(compiled)
    facts = _read(path)
    if facts is None:
        # What ptxas says is in no cache of Triton's.
        compiled = compiled if compiled.log else compile_launch(launch, architecture, always=True)
        facts = compiled.facts()
        _write(path, facts)
    if facts.spills_in_loops is None and (facts.spill_stores or facts.spill_loads):
        facts = dataclasses.replace(facts, spills_in_loops=_spills_in_loops(compiled))
        _write(path, facts)
    if not mix:
        return Inspected(dataclasses.replace(facts, mix=None))
    text = ""
    if sass or facts.mix is None:
        try:
            text = disassemble(compiled.cubin)
        except RuntimeError as error:
            return Inspected(facts, trouble=str(error))
    if facts.mix is None:
        facts = dataclasses.replace(facts, mix=instruction_mix(text))
        _write(path, facts)
    return Inspected(facts, text if sass else "")


def _spills_in_loops(compiled: Compiled) -> int | None:
    try:
        return spills_in_loops(disassemble(compiled.cubin))
    except RuntimeError:
        return None


def _path(compiled: Compiled) -> Path:
    key = f"{FORMAT} {compiled.kernel.hash} {ptxas_version(compiled.architecture)}"
    return Path(triton.knobs.cache.dir, "tilewise-inspect", f"{hashlib.sha256(key.encode()).hexdigest()}.json")


def _read(path: Path) -> Facts | None:
    try:
        return Facts(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        # None there, or one that a killed process left unfinished.
        return None


def _write(path: Path, facts: Facts) -> None:
    # Where nothing can be written it is only slower.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(dataclasses.asdict(facts)))
        unfinished.replace(path)
