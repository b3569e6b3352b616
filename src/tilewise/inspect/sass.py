"""A kernel's SASS, as the disassembler inside the triton package writes it, and how many instructions of each kind it
has.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import triton

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
# `/*0080*/   @!P0 LDG.E.128 R4, ...` with nvdisasm; a predicate may stand first.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


def disassemble(cubin: bytes) -> str:
    """The SASS; a RuntimeError with what the disassembler said where it knows no such architecture."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        result = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", str(path)], capture_output=True, text=True)
    if result.returncode or not _INSTRUCTION.search(result.stdout):
        raise RuntimeError(f"nvdisasm cannot read it: {result.stderr.strip() or 'it wrote no instruction'}")
    return result.stdout


def instruction_mix(sass: str) -> Mapping[str, int]:
    """How many instructions of each of KINDS there are, and of all, as they stand in the code, not as often as they
    run.
    """
    opcodes = _INSTRUCTION.findall(sass)
    return {kind: sum(bool(pattern.match(opcode)) for opcode in opcodes) for kind, pattern in _PATTERNS.items()} | {
        "all": len(opcodes)
    }
