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


_LABEL = re.compile(r"^(\.L\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
# What a block of instructions ends with; unless under a predicate, which may stand before it or be its first operand.
_BRANCH, _END = re.compile(r"BRA(?:\.|$)"), re.compile(r"(?:EXIT|RET|BRX|JMX|KILL)(?:\.|$)")
_CONDITIONAL = re.compile(r"@!?U?P\w|\bBRA\S*\s+!?U?P\d")


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


class _Block:
    """Instructions that run one after the other; where they may go on, and how many of them reach local memory."""

    def __init__(self) -> None:
        self.next: list[str | int] = []
        self.spills = 0


def _blocks(sass: str) -> tuple[list[_Block], dict[str, int]]:
    """The blocks of a kernel in order, and those that labels name."""
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
    """How many loads and stores of local memory, which is where registers are spilt to, lie in a loop.

    By the flow of control, not by the order of addresses: the assembler puts waits and other rare code behind the end,
    from where a branch leads back that is no loop.
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
