"""Compiles launches for any GPU on a machine without one, through Triton's ordinary path, and reads off the resources
they use.

A kernel's SASS, from the disassembler in the triton package, and its instruction counts by kind.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise.inspect.facts import WARP, Facts
from tilewise.ops._host.launching import Launch

# Opcodes by kind, without their suffixes.
KINDS = {
    "matrix": r"[A-Z]*MMA",
    "exp2": r"MUFU\.EX2",
    "fma": r"FFMA2?|HFMA2|DFMA",
    "global loads": r"LDG|LDGSTS|UTMALDG|UBLKCP|LD",
    "shared loads": r"LDS|LDSM",
    "stores": r"STG|STS|STSM|UTMASTG|ST|RED|REDG|ATOM|ATOMG|ATOMS",
    "barriers": r"BAR|SYNCS|MEMBAR|ERRBAR|UCGABAR_[A-Z]+",
    "local": r"LDL|STL",
}
_PATTERNS = {kind: re.compile(rf"(?:{opcodes})(?:\.|$)") for kind, opcodes in KINDS.items()}
# `/*0080*/   @!P0 LDG.E.128 R4, ...` with nvdisasm; a predicate may come first.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
# What ends a basic block; unless under a predicate, which may come before it or be its first operand.
_BRANCH, _END = re.compile(r"BRA(?:\.|$)"), re.compile(r"(?:EXIT|RET|BRX|JMX|KILL)(?:\.|$)")
_CONDITIONAL = re.compile(r"@!?U?P\w|\bBRA\S*\s+!?U?P\d")


def disassemble(cubin: bytes) -> str:
    """The SASS; a RuntimeError with the disassembler's message if it does not know the architecture."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        result = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True)
    if result.returncode or not _INSTRUCTION.search(result.stdout):
        raise RuntimeError(f"nvdisasm cannot read it: {result.stderr.strip() or 'it wrote no instruction'}")
    return result.stdout


def instruction_mix(sass: str) -> Mapping[str, int]:
    """Static counts of instructions, by KINDS and in total: as they are in the code, not as often as they run."""
    opcodes = _INSTRUCTION.findall(sass)
    return {kind: sum(bool(pattern.match(opcode)) for opcode in opcodes) for kind, pattern in _PATTERNS.items()} | {
        "all": len(opcodes)
    }


class _Block:
    """A basic block: its possible successors, and how many of its instructions access local memory."""

    def __init__(self) -> None:
        self.next: list[str | int] = []
        self.spills = 0


def _blocks(sass: str) -> tuple[list[_Block], dict[str, int]]:
    """The basic blocks of a kernel in order, and those that labels name."""
    blocks, labels, open_ = [_Block()], {}, True
    for line in sass.splitlines():
        label, instruction = _LABEL.match(line), _INSTRUCTION.match(line)
        if label:
            if open_:
                blocks[-1].next.append(len(blocks))
            blocks.append(_Block())
            labels[label[1]], open_ = len(blocks) - 1, True
        elif instruction:
            opcode, conditional = instruction[1], bool(_CONDITIONAL.search(line))
            blocks[-1].spills += bool(_PATTERNS["local"].match(opcode))
            target = _TARGET.search(line) if _BRANCH.match(opcode) else None
            if target:
                blocks[-1].next.append(target[1])
            if target or _END.match(opcode):
                open_ = conditional
                if open_:
                    blocks[-1].next.append(len(blocks))
                blocks.append(_Block())
    return blocks, labels


def spills_in_loops(sass: str) -> int:
    """How many loads and stores of local memory, which is where registers spill to, are in a loop.

    By control flow, not by address order: the assembler puts waits and other cold code after the end, and a branch back
    from there is not a loop.
    """
    blocks, labels = _blocks(sass)
    after = [
        [x if isinstance(x, int) else labels[x] for x in block.next if x in labels or isinstance(x, int)]
        for block in blocks
    ]

    def comes_back(start: int) -> bool:
        seen: set[int] = set()
        left = [i for i in after[start] if i < len(blocks)]
        while left:
            i = left.pop()
            if i == start:
                return True
            if i not in seen:
                seen.add(i)
                left += [j for j in after[i] if j < len(blocks)]
        return False

    return sum(block.spills for i, block in enumerate(blocks) if block.spills and comes_back(i))


@dataclass(frozen=True)
class Compiled:
    """One kernel as Triton compiled it for one architecture; `log` is ptxas's output, empty if the kernel was in
    Triton's cache.
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
        """The machine code."""
        return bytes(self.kernel.asm["cubin"])

    def _multiplies(self) -> bool:
        """Whether it multiplies matrices.

        Gluon begins with the second of Triton's languages, where the product has the unit's name.
        """
        asm = self.kernel.asm
        return "tt.dot" in asm["ttir"] if "ttir" in asm else "warp_group_dot " in asm["ttgir"]

    def facts(self) -> Facts:
        """The resources it uses."""
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
    """Of the assembler that Triton uses for an architecture."""
    from triton.backends.nvidia.compiler import get_ptxas_version

    said = get_ptxas_version(architecture)
    version = re.search(r"V([\d.]+)", said)
    return version[1] if version else str(said).strip()


class _NoDriver:
    """Stands in for a CUDA driver: tells Triton which GPU to compile for, nothing else."""

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
    """Inside, Triton sees a GPU of this architecture."""
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_NoDriver(architecture))
    try:
        yield
    finally:
        triton.runtime.driver._active = active


def compile_launch(launch: Launch, architecture: int, always: bool = False) -> Compiled:
    """Compile a launch (its tensors may be on the `meta` device) for an architecture, 90 for an H100. Needs a process
    that does not interpret.

    `always` compiles even what is in Triton's cache, since ptxas's output is not kept there.
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
    """What a kernel uses; its SASS, "" if not requested; and why there is neither SASS nor an instruction mix, "" if
    there is.
    """

    facts: Facts
    sass: str = ""
    trouble: str = ""


def inspect_launch(launch: Launch, architecture: int, mix: bool, sass: bool) -> Inspected:
    """What a launch's kernel uses, with its instruction mix or its SASS if requested."""
    compiled = compile_launch(launch, architecture)
    path = _path(compiled)
    facts = _read(path)
    if facts is None:
        # ptxas's output is not in Triton's cache.
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
    # If nothing can be written, it is only slower.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(dataclasses.asdict(facts)))
        unfinished.replace(path)
