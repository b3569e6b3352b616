"""What kernels use, kept on disk beside Triton's own cache, so that nothing is assembled or disassembled twice."""

import contextlib
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import triton

from tilewise.inspect.compile import Compiled, compile_launch, ptxas_version
from tilewise.inspect.facts import Facts
from tilewise.inspect.sass import disassemble, instruction_mix, spills_in_loops
from tilewise.ops._host.launching import Launch

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
