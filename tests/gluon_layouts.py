"""Cases of what Triton's compiler takes and refuses for its layouts, each refusal beside something that is right.

`python tests/gluon_layouts.py N` compiles every Nth of them for sm_90, without a GPU, and prints as JSON those that
are refused. Each has a process of its own, for Triton ends the process for some.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import triton
from gluon_aggregate_kernels import state_kernel, tuples_kernel, wrong_kernel
from gluon_layout_kernels import (
    copy_kernel,
    dot_kernel,
    pointers_kernel,
    shared_kernel,
    threads_copy_kernel,
    tile_kernel,
    warpgroup_kernel,
)
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tilewise._gluon.compiler import TELLS_OFFSETS

F16, BF16, F32, F64, F8, I8, I32 = (
    gl.float16,
    gl.bfloat16,
    gl.float32,
    gl.float64,
    gl.float8e4nv,
    gl.int8,
    gl.int32,
)
Swizzled, Blocked, Slice, Linear = gl.SwizzledSharedLayout, gl.BlockedLayout, gl.SliceLayout, gl.SharedLinearLayout


def nvmma(swizzle: int = 128, bits: int = 16, rank: int = 2) -> Any:
    return gl.NVMMASharedLayout(swizzle, bits, rank)


def mma(n: int = 64, k: int = 16, warps: tuple[int, int] = (4, 1), m: int = 16) -> Any:
    return gl.NVMMADistributedLayout([3, 0], list(warps), [m, n, k])


LINE, LINES, CUBE = Swizzled(1, 1, 1, [0]), Swizzled(1, 1, 1, [1, 0]), Swizzled(1, 1, 1, [2, 1, 0])
SWIRL = Swizzled(8, 1, 8, [1, 0])
SQUARE = Linear([[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0], [8, 0]])
ROW, PAIRS = Blocked([1], [32], [4], [0]), Blocked([2], [32], [4], [0])
TILE, WIDE = Blocked([1, 1], [1, 32], [4, 1], [1, 0]), Blocked([1, 8], [4, 8], [4, 1], [1, 0])
COLUMNS = Blocked([1, 1], [32, 1], [1, 4], [0, 1])
TWOS = Blocked([1, 2], [32, 1], [4, 1], [1, 0])
MMA, BY_WARPS = mma(), gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
LANES = [[1], [2], [4], [8], [16]]
# Triton takes slices of an array of buffers from 3.9 on.
SLICES_BUFFERS = hasattr(gl.shared_memory_descriptor, "reinterpret")


class Case(NamedTuple):
    """A launch with arguments that are all constants but the first, of whose dtype there are many elements."""

    kernel: Any
    arguments: dict[str, Any]
    refused: bool
    warps: int = 4
    dtype: str = "int32"


def spread(lanes: list[list[int]]) -> Any:
    return gl.DistributedLinearLayout([], lanes, [[32], [64]], [], [128])


def _steps(steps: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("FIRST", "SECOND", "THIRD"), steps, strict=False))


def shared(refused: bool, shape: list[int], layout: Any, *steps: Any, dtype: Any = I32) -> Case:
    return Case(shared_kernel, {"DTYPE": dtype, "SHAPE": shape, "LAYOUT": layout, **_steps(steps)}, refused)


def tile(refused: bool, shape: list[int], layout: Any, *steps: Any, dtype: Any = I32, warps: int = 4) -> Case:
    return Case(tile_kernel, {"DTYPE": dtype, "SHAPE": shape, "LAYOUT": layout, **_steps(steps)}, refused, warps)


def warpgroup(
    refused: bool, a: Any = None, b: Any = None, acc: Any = MMA, dtype: Any = F16, added: Any = F32, warps: int = 4,
    transposed: bool = False, **sizes: int,
) -> Case:  # fmt: skip
    bits = dtype.primitive_bitwidth
    layout = nvmma(min(128, 64 * bits // 8), bits)
    operands = {"A": a or layout, "B": b or layout, "ACC": acc, "DTYPE": dtype, "ADDED": added}
    ways = {"TRANSPOSED": transposed, "REGISTERS": isinstance(a, gl.DotOperandLayout)}
    return Case(warpgroup_kernel, {"M": 64, "N": 64, "K": 64, **operands, **ways, **sizes}, refused, warps)


def dot(
    refused: bool, widths: tuple[int, int] = (2, 2), acc: Any = BY_WARPS, dtype: Any = F16, added: Any = F32,
    matrix: bool = True, k: int = 64,
) -> Case:  # fmt: skip
    a, b = (gl.DotOperandLayout(i, acc, width) for i, width in enumerate(widths))
    arguments = {"K": k, "A": a, "B": b, "ACC": acc, "DTYPE": dtype, "ADDED": added, "MATRIX": matrix}
    return Case(dot_kernel, arguments, refused)


def copy(
    refused: bool, block: list[int], layout: Any, shared: Any = None, shape: list[int] | None = None, dtype: Any = F16,
    barriers: int = 1, of: str = "float16",
) -> Case:  # fmt: skip
    arguments = {"BLOCK": block, "LAYOUT": layout, "DTYPE": dtype, "SHAPE": shape or block, "SHARED": shared or layout}
    return Case(copy_kernel, {**arguments, "BARRIERS": barriers}, refused, dtype=of)


def threads_copy(refused: bool, shape: list[int], layout: Any, shared: Any, dtype: Any = F16) -> Case:
    arguments = {"SHAPE": shape, "LAYOUT": layout, "DTYPE": dtype, "SHARED": shared}
    return Case(threads_copy_kernel, arguments, refused, dtype="float16" if dtype == F16 else "int32")


CASES: dict[str, Case] = {
    # Shared memory.
    "buffers": shared(False, [3, 128], LINE, ("index", 0), ("load", ROW)),
    "buffers of a layout of too many axes": shared(True, [2, 128], LINES, ("index", 0), ("load", ROW)),
    "buffers of buffers": shared(True, [2, 4, 128], LINE, ("index", 0), ("index", 0), ("load", ROW)),
    "buffers loaded all at once": shared(True, [2, 128], LINE, ("load", TILE)),
    "no power of two": shared(True, [64, 96], LINES, ("load", TILE)),
    "an order that is none": shared(True, [64, 64], Swizzled(1, 1, 1, [1, 1]), ("load", TILE)),
    "swizzled": shared(False, [64, 32], nvmma(64), ("load", WIDE), dtype=F16),
    "narrower than its swizzle": shared(True, [64, 32], nvmma(), ("load", WIDE), dtype=F16),
    "swizzled rows, too few": shared(True, [4, 64], nvmma(), ("load", WIDE), dtype=F16),
    "swizzled line": shared(True, [64], nvmma(128, 16, 1), ("load", ROW), dtype=F16),
    "plain line": shared(False, [64], nvmma(0, 16, 1), ("load", ROW), dtype=F16),
    "linear": shared(False, [16, 16], SQUARE, ("load", TILE)),
    "linear, of another shape": shared(True, [16, 32], SQUARE, ("load", TILE)),
    "linear, twice in one place": shared(True, [4, 4], Linear([[0, 1], [0, 1], [1, 0], [2, 0]]), ("load", TILE)),
    "true and false": shared(True, [128], LINE, ("load", ROW), dtype=gl.int1),
    # Views of it.
    "slice": shared(False, [64, 64], LINES, ("slice", 16, 16, 1), ("load", TILE)),
    "slice that begins anywhere": shared(True, [64, 64], LINES, ("slice", 8, 16, 1), ("load", TILE)),
    "slice of no power of two": shared(True, [64, 64], LINES, ("slice", 0, 12, 1), ("load", TILE)),
    "slice along no axis": shared(True, [64, 64], LINES, ("slice", 0, 16, 2), ("load", TILE)),
    "slice of swizzled rows": shared(False, [64, 64], SWIRL, ("slice", 16, 16, 0), ("load", TILE), dtype=F16),
    "slice through a swizzle": shared(True, [64, 64], SWIRL, ("slice", 4, 4, 0), ("load", TILE), dtype=F16),
    "slice of NVMMA rows": shared(False, [64, 64], nvmma(), ("slice", 16, 16, 0), ("load", WIDE), dtype=F16),
    "slice through NVMMA": shared(True, [64, 64], nvmma(), ("slice", 4, 4, 0), ("load", WIDE), dtype=F16),
    "slice of a buffer": shared(False, [2, 64, 64], LINES, ("index", 1), ("slice", 0, 32, 1), ("load", TILE)),
    "slice of buffers": shared(not SLICES_BUFFERS, [4, 128], LINE, ("slice", 1, 2, 0), ("index", 0), ("load", ROW)),
    "slice of each buffer": shared(True, [4, 128], LINE, ("slice", 0, 64, 1), ("index", 0), ("load", ROW)),
    "permute": shared(False, [64, 32], LINES, ("permute", [1, 0]), ("load", TILE)),
    "permute of NVMMA": shared(False, [64, 128], nvmma(), ("permute", [1, 0]), ("load", WIDE), dtype=F16),
    "permute of a buffer": shared(False, [2, 64, 32], LINES, ("index", 1), ("permute", [1, 0]), ("load", TILE)),
    "permute of buffers": shared(True, [2, 64, 32], LINES, ("permute", [0, 2, 1]), ("index", 0), ("load", TILE)),
    "permute by one axis twice": shared(True, [64, 32], LINES, ("permute", [1, 1]), ("load", TILE)),
    "permute by too few axes": shared(True, [64, 32], LINES, ("permute", [0]), ("load", TILE)),
    "reshape": shared(False, [64, 64], SWIRL, ("reshape", [4096]), ("load", ROW), dtype=F16),
    "reshape of NVMMA": shared(False, [64, 128], nvmma(), ("reshape", [128, 64]), ("load", WIDE), dtype=F16),
    "reshape to other elements": shared(True, [64, 32], LINES, ("reshape", [64, 64]), ("load", TILE)),
    "reshape of a slice": shared(True, [64, 64], LINES, ("slice", 0, 32, 0), ("reshape", [2048]), ("load", ROW)),
    "reshape of buffers": shared(True, [2, 128], LINE, ("reshape", [256]), ("load", ROW)),
    "reinterpret": shared(False, [64, 32], LINES, ("reinterpret", F16, [64, 64], LINES), ("load", TILE)),
    "reinterpret by a wrong layout": shared(True, [64, 32], LINES, ("reinterpret", F16, [4096], LINES), ("load", ROW)),
    # Its tiles.
    "load in a slice": shared(False, [64], LINE, ("load", Slice(1, TILE))),
    "load of too many axes": shared(True, [64, 64], LINES, ("load", ROW)),
    "load by too many warps": shared(True, [128], LINE, ("load", Blocked([1], [32], [8], [0]))),
    "load by half a warp": shared(True, [128], LINE, ("load", Blocked([1], [16], [4], [0]))),
    "store": tile(False, [128], ROW, ("store", I32, [128], LINE)),
    "store of another shape": tile(True, [128], ROW, ("store", I32, [256], LINE)),
    "store of another dtype": tile(True, [128], ROW, ("store", F32, [128], LINE)),
    "store to all buffers": tile(True, [2, 128], TILE, ("store", I32, [2, 128], LINE)),
    # Tiles.
    "two warps": tile(False, [128], Blocked([1], [32], [2], [0]), warps=2),
    "two warps of four": tile(True, [128], Blocked([1], [32], [2], [0])),
    "sliced warps": tile(True, [64], Slice(0, Blocked([1, 1], [1, 32], [8, 1], [1, 0]))),
    "tile of too many axes": tile(True, [64, 64], ROW),
    "tile of no power of two": tile(True, [96], ROW),
    "three elements a thread": tile(True, [64, 64], Blocked([1, 3], [1, 32], [4, 1], [1, 0])),
    "slice of an axis too many": tile(True, [64], Slice(2, TILE)),
    "linear tile": tile(False, [256], spread(LANES)),
    "linear tile of few lanes": tile(True, [256], spread(LANES[:-1])),
    "accumulator": tile(False, [64, 64], MMA, dtype=F32),
    "accumulator of three axes": tile(False, [2, 64, 64], gl.NVMMADistributedLayout([2, 0], [1, 4, 1], [1, 16, 8])),
    "accumulator of three axes by two": tile(True, [2, 64, 64], gl.NVMMADistributedLayout([2, 0], [1, 4, 1], [16, 8])),
    "accumulator of no version": tile(True, [64, 64], gl.NVMMADistributedLayout([4, 0], [4, 1], [16, 64, 16])),
    "accumulator of no width": tile(True, [64, 64], gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 12, 16])),
    "accumulator of other warps": tile(True, [64, 64], gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 64, 16])),
    "operand": tile(False, [64, 64], gl.DotOperandLayout(0, MMA, 2), dtype=F16),
    "operand of no width": tile(True, [64, 64], gl.DotOperandLayout(0, MMA, 3), dtype=F16),
    "second operand in registers": tile(True, [64, 64], gl.DotOperandLayout(1, MMA, 2), dtype=F16),
    "operand of a slice": tile(True, [64], gl.DotOperandLayout(0, Slice(1, TILE), 0), dtype=F16),
    "operand without matrix units": tile(False, [64, 64], gl.DotOperandLayout(0, TILE, 0), dtype=F16),
    "its width": tile(True, [64, 64], gl.DotOperandLayout(0, TILE, 2), dtype=F16),
    # What is made of tiles.
    "convert": tile(False, [128], ROW, ("convert", PAIRS), ("add", [128], PAIRS)),
    "convert to too many axes": tile(True, [128], ROW, ("convert", TILE)),
    "convert of a number": tile(True, [128], ROW, ("sum", 0), ("convert", ROW)),
    "trivial": tile(False, [128], ROW, ("trivial", Slice(1, Blocked([1, 1], [32, 1], [4, 1], [1, 0])))),
    "not trivial": tile(True, [512], ROW, ("trivial", PAIRS)),
    "reshaped there and back": tile(False, [128], ROW, ("reshape", [4, 32]), ("reshape", [128]), ("add", [128], ROW)),
    "reshaped to a linear layout": tile(True, [64, 64], TILE, ("reshape", [4096]), ("add", [4096], ROW)),
    "reshaped to other elements": tile(True, [64, 64], TILE, ("reshape", [8192])),
    "permuted": tile(False, [64, 32], TILE, ("permute", [1, 0]), ("add", [32, 64], COLUMNS)),
    "permuted, in the old layout": tile(True, [64, 32], TILE, ("permute", [1, 0]), ("add", [32, 64], TILE)),
    "an accumulator permuted twice": tile(True, [64, 64], MMA, *[("permute", [1, 0])] * 2, ("add", [64, 64], MMA)),
    "expand_dims": tile(False, [64], Slice(1, TILE), ("expand", 1), ("add", [64, 1], TILE)),
    "expand_dims along another axis": tile(True, [64], Slice(1, TILE), ("expand", 0)),
    "expand_dims of no slice": tile(True, [128], ROW, ("expand", 0)),
    "sum": tile(False, [64, 64], TILE, ("sum", 1), ("add", [64], Slice(1, TILE))),
    "sum, in another slice": tile(True, [64, 64], TILE, ("sum", 1), ("add", [64], Slice(0, TILE))),
    "split": tile(False, [64, 2], TWOS, ("split",), ("add", [64], Slice(1, TWOS))),
    "split across threads": tile(True, [64, 2], TILE, ("split",)),
    "join": tile(False, [128], ROW, ("join",), ("add", [128, 2], TWOS)),
    "joined and split": tile(True, [128], ROW, ("join",), ("split",), ("add", [128], ROW)),
    "broadcast": tile(False, [64, 1], TILE, ("broadcast", [64, 64])),
    "broadcast to more axes": tile(True, [64], ROW, ("broadcast", [64, 64])),
    "broadcast of two columns": tile(True, [64, 2], TILE, ("broadcast", [64, 64])),
    "pointers": Case(pointers_kernel, {"LAYOUT": TILE}, False),
    "gather": tile(False, [64, 64], TILE, ("gather", [32, 64], TILE)),
    "gather of fewer columns": tile(True, [64, 64], TILE, ("gather", [64, 32], TILE)),
    # Products of warpgroups.
    "product": warpgroup(False),
    "product of transposed B": warpgroup(False, transposed=True),
    "product, narrowly swizzled": warpgroup(False, nvmma(32), nvmma(32)),
    "product, not swizzled": warpgroup(True, nvmma(0)),
    "product, swizzled another way": warpgroup(True, SWIRL),
    "product from registers": warpgroup(False, gl.DotOperandLayout(0, MMA, 2)),
    "product from registers of another width": warpgroup(True, gl.DotOperandLayout(0, MMA, 4)),
    "product of half a warpgroup": warpgroup(True, acc=mma(warps=(2, 1)), warps=2),
    "product of two warpgroups": warpgroup(False, acc=mma(warps=(4, 2)), warps=8),
    "product of few rows": warpgroup(True, M=32),
    "product of few columns": warpgroup(False, acc=mma(8), b=nvmma(0), N=8),
    "product of too few columns": warpgroup(True, acc=mma(128)),
    "product of too many columns": warpgroup(True, acc=mma(512), N=512),
    "product of many columns": warpgroup(False, acc=mma(256), N=256),
    "product of too small a K": warpgroup(True, nvmma(0), K=8),
    "product with another K": warpgroup(True, acc=mma(k=8)),
    "product with other rows": warpgroup(True, acc=mma(m=32), M=128),
    "product into Ampere's layout": warpgroup(True, acc=BY_WARPS),
    "product into a blocked layout": warpgroup(True, acc=TILE),
    "product into fp16": warpgroup(False, added=F16),
    "product of bf16 into fp16": warpgroup(True, dtype=BF16, added=F16),
    "product into fp64": warpgroup(True, added=F64),
    "product of fp32": warpgroup(False, acc=mma(k=8), dtype=F32, transposed=True),
    "product of fp32, B not transposed": warpgroup(True, acc=mma(k=8), dtype=F32),
    "product of fp8": warpgroup(False, acc=mma(k=32), dtype=F8, transposed=True),
    "product of fp8, B not transposed": warpgroup(True, acc=mma(k=32), dtype=F8),
    "product of int8": warpgroup(False, acc=mma(k=32), dtype=I8, added=I32, transposed=True),
    "product of int32": warpgroup(True, acc=mma(k=8), dtype=I32, added=I32, transposed=True),
    # Products by warps, and without matrix units.
    "dot": dot(False),
    "dot of narrow operands": dot(True, (1, 1)),
    "dot of wide operands": dot(False, (4, 4)),
    "dot of two widths": dot(True, (2, 4)),
    "dot of too small a K": dot(True, k=8),
    "dot of fp32": dot(False, (1, 1), dtype=F32),
    "dot of fp32 into fp16": dot(True, (1, 1), dtype=F32, added=F16),
    "dot of bf16 into bf16": dot(True, dtype=BF16, added=BF16),
    "dot of int8": dot(False, (4, 4), dtype=I8, added=I32),
    "dot into Hopper's layout": dot(True, acc=MMA),
    "fma": dot(False, (0, 0), TILE, F32, F32, False),
    "fma of operands with a width": dot(True, (1, 1), TILE, F32, F32, False),
    "fma of fp16 into fp32": dot(True, (0, 0), TILE, F16, F32, False),
    "fma of int32": dot(True, (0, 0), TILE, I32, I32, False),
    # Copies by TMA.
    "copy": copy(False, [64, 64], nvmma()),
    "copy of more columns": copy(False, [64, 128], nvmma()),
    "copy of few columns": copy(False, [64, 8], nvmma(0)),
    "copy of too few columns": copy(True, [64, 4], nvmma(0)),
    "copy of few rows": copy(True, [4, 64], nvmma()),
    "copy of no power of two": copy(True, [48, 64], nvmma()),
    "copy of a line": copy(False, [256], nvmma(0, 16, 1)),
    "copy of a swizzled line": copy(True, [64], nvmma(128, 16, 1)),
    "copy of three axes": copy(False, [2, 64, 64], nvmma(rank=3)),
    "copy of three axes by two": copy(True, [2, 64, 64], nvmma()),
    "copy of three axes to two": copy(False, [2, 64, 64], nvmma(rank=3), nvmma(), [128, 64]),
    "copy in a plain layout": copy(True, [64, 64], LINES),
    "copy to a plain layout": copy(True, [64, 64], nvmma(), LINES),
    "copy with two barriers": copy(True, [64, 64], nvmma(), barriers=2),
    "copy of fp32": copy(False, [64, 64], nvmma(128, 32), dtype=F32, of="float32"),
    # Copies by threads.
    "copy by threads": threads_copy(False, [128], ROW, LINE, I32),
    "copy by threads of two halves": threads_copy(False, [256], PAIRS, LINE),
    "copy by threads of a half": threads_copy(True, [128], ROW, LINE),
    "copy by threads along the other axis": threads_copy(True, [64, 64], COLUMNS, LINES),
    "copy by threads, swizzled by eight": threads_copy(False, [64, 64], WIDE, SWIRL),
    "copy by threads, swizzled by one": threads_copy(True, [64, 64], WIDE, Swizzled(1, 1, 8, [1, 0])),
    "copy by threads to NVMMA": threads_copy(False, [64, 64], WIDE, nvmma()),
}  # fmt: skip
if TELLS_OFFSETS:
    # Triton 3.6 does not look.
    CASES |= {
        "copy of another dtype": copy(True, [64, 64], nvmma(), dtype=BF16),
        "copy to another swizzle": copy(True, [64, 64], nvmma(), nvmma(64)),
        "copy of other elements": copy(True, [64, 64], nvmma(), shape=[128, 64]),
        "copy, transposed": copy(True, [64, 64], gl.NVMMASharedLayout(128, 16, 2, True)),
    }
# What kernels are written with besides; gluon/test_aggregates.py runs it.
HOWS = (
    (state_kernel, False, ("for", "while", "if", "static_range")),
    (tuples_kernel, False, ("named", "joined", "carried", "unrolled", "nested")),
    (
        wrong_kernel,
        True,
        (
            "tensor for a constant",
            "another aggregate",
            "aggregate for a tensor",
            "field that changes",
            "field too few",
            "assertion",
        ),
    ),
)
COMPILED = CASES | {
    f"{kernel.__name__}, {how}": Case(kernel, {"HOW": how}, refused) for kernel, refused, hows in HOWS for how in hows
}


def _compile(case: Case) -> None:
    names = case.kernel.arg_names
    pointer = {"int32": "*i32", "float16": "*fp16", "float32": "*fp32"}[case.dtype]
    source = GluonASTSource(
        case.kernel,
        {name: pointer if name == "x" else "constexpr" for name in names},
        {
            (i,): case.arguments.get(name, parameter.default)
            for i, (name, parameter) in enumerate(zip(names, case.kernel.params, strict=True))
            if name != "x"
        },
        {(0,): [["tt.divisibility", 16]]},
    )
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": case.warps})


def _is_refused(case: Case) -> bool:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with redirect_stderr(io.StringIO()):
            _compile(case)
        status = 0
    finally:
        # Nothing of the parent's is to be ended twice.
        os._exit(status)


if __name__ == "__main__":
    print(json.dumps([name for name in list(COMPILED)[:: int(sys.argv[1])] if _is_refused(COMPILED[name])]))
