"""Products of tiles, as the matrix units of Ampere and Hopper take their operands."""

import math
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.compiler import ask, linear_layout, tile_type
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.shared import Shared
from tilewise._gluon.values import FP8, GLUON, Tile, plain, torch_dtype

BYTES = {"int8", "uint8"}
# What is left of an fp32 operand's bits: 10 of the mantissa's 23. The others are not looked at.
TF32 = ~0x1FFF
# What the matrix units add products to, by the operands' dtype.
ACCUMULATORS = {
    torch.float16: (torch.float16, torch.float32),
    torch.bfloat16: (torch.float32,),
    torch.float32: (torch.float32,),
    torch.float64: (torch.float64,),
    torch.int8: (torch.int32,),
    torch.uint8: (torch.int32,),
    **dict.fromkeys(FP8.values(), (torch.float16, torch.float32)),
}
# Of Hopper's instruction: rows of a warp, bits along K, and most columns.
ROWS, K_BITS, MOST_COLUMNS = 16, 256, 256
# Bits of an operand in registers.
OPERAND_BITS = 32
# The longest rows, in bytes, of shared memory that is not swizzled. Some Tritons take fewer, or 8 longer ones.
PLAIN_BYTES, PLAIN_ROWS = 32, 8


def matrix_product(a: torch.Tensor, b: torch.Tensor, precision: Any, operation: str) -> torch.Tensor:
    """a @ b in fp32; of whole numbers in int32, exactly."""
    if a.dtype is torch.float32:
        if precision not in (None, "tf32"):
            message = f"{operation} of fp32 with precision {precision!r}: the matrix units take tf32 alone"
            raise KernelFaultError("operand", message, executed())
        return as_tf32(a) @ as_tf32(b)
    if not a.dtype.is_floating_point:
        # In fp64 no sum of products of 8 bits is rounded.
        return (a.double() @ b.double()).to(torch.int32)
    if a.dtype is torch.float64:
        return a @ b
    return a.float() @ b.float()


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """fp32 as the matrix units read it: towards 0."""
    return (x.view(torch.int32) & TF32).view(torch.float32)


def check_operands(a: Any, b: Any, acc: Any, operation: str) -> None:
    """Dtypes and shapes. Operands of 8 bits may be of two dtypes."""
    lines = executed()
    if a.dtype != b.dtype and not any({a.dtype.name, b.dtype.name} <= names for names in (FP8.keys(), BYTES)):
        raise KernelFaultError("dtypes differ", f"{operation} of {a.dtype} and {b.dtype}", lines)
    if a.dtype.is_int() != acc.dtype.is_int():
        raise KernelFaultError("dtypes differ", f"{operation} of {a.dtype} into {acc.dtype}", lines)
    if a.shape != [acc.shape[0], b.shape[0]] or b.shape[1] != acc.shape[1]:
        raise KernelFaultError("shapes differ", f"{operation} of {a.shape}, {b.shape} into {acc.shape}", lines)


def _refuse(problem: str, operation: str, *operands: Any) -> None:
    message = f"{problem}: {operation} of {' and '.join(map(str, operands))}"
    raise KernelFaultError("refused", message, executed())


def _check_accumulator(a: Any, acc: Any, operation: str) -> None:
    takes = ACCUMULATORS.get(torch_dtype(a.dtype), ())
    if acc.kind not in takes:
        expected = " or ".join(str(GLUON[kind]) for kind in takes) or "another operand"
        _refuse(f"it adds to {expected}", operation, a.dtype, acc.dtype)


def check_warpgroup(a: Any, b: Any, acc: Any) -> None:
    """Operands and accumulator of a warpgroup's product, in layouts that Triton can lower."""
    name = "warpgroup_mma"
    if not isinstance(b, Shared):
        message = "the second operand of warpgroup_mma must be in shared memory"
        raise KernelFaultError("operand", message, executed())
    check_operands(a, b, acc, name)
    _check_accumulator(a, acc, name)
    layout = acc.layout
    if layout is None:
        return
    if not isinstance(layout, gl.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        message = f"{name} adds to NVMMADistributedLayout of version [3, 0], not to {layout}"
        raise KernelFaultError("layouts differ", message, executed())
    for x in (a, b):
        if isinstance(x, Shared) and not isinstance(x.layout, gl.NVMMASharedLayout | gl.SharedLinearLayout):
            _refuse("an operand in shared memory is in NVMMASharedLayout", name, x.kind)
    if isinstance(a, Tile) and a.layout is not None:
        # The compiler does not look at the parent: another is right where it gives threads the same.
        expected = gl.DotOperandLayout(0, layout, OPERAND_BITS // a.dtype.primitive_bitwidth)
        if not isinstance(a.layout, gl.DotOperandLayout) or linear_layout(a.layout, a.shape) != linear_layout(
            expected, a.shape
        ):
            message = f"the first operand of {name} is in {a.layout}: expected {expected}"
            raise KernelFaultError("layouts differ", message, executed())
    if not isinstance(a, Tile) or a.layout is not None:
        ask(name, *(x.kind if isinstance(x, Shared) else tile_type(x) for x in (a, b, acc)))
    _check_instruction(a, b, acc, name)


def _check_instruction(a: Any, b: Any, acc: Any, name: str) -> None:
    """What Triton finds out only when it lowers a product."""
    shape, bits = list(acc.layout.instr_shape), a.dtype.primitive_bitwidth
    expected = [ROWS, min(MOST_COLUMNS, acc.shape[1]), K_BITS // bits]
    if len(shape) != len(expected) or shape[0] != ROWS or shape[1] > expected[1] or shape[2] != expected[2]:
        _refuse(f"instr_shape {shape}: expected {expected}, or fewer columns", name, acc.layout)
    if a.shape[1] < expected[2]:
        _refuse(f"K is {a.shape[1]}: expected at least {expected[2]}", name, a.layout)
    for x, along_k in ((a, False), (b, True)):
        if not isinstance(x, Shared) or not isinstance(x.layout, gl.NVMMASharedLayout):
            continue
        columns = x.shape[0 if x.layout.transposed else -1]
        if bits != 16 and x.layout.transposed != along_k:
            _refuse("elements of 8 or 32 bits lie side by side along K: expected the transposed operand", name, x.kind)
        rows, width = math.prod(x.shape) // columns, columns * bits // 8
        if not x.layout.swizzle_byte_width and width > PLAIN_BYTES and not (bits == 16 and rows == PLAIN_ROWS):
            _refuse(f"rows of {width} bytes that are not swizzled: expected at most {PLAIN_BYTES}", name, x.kind)


def _in_registers(a: Any, b: Any, acc: Any, layout: Any, operation: str) -> None:
    """Operands are tiles in the accumulator's layout, as operands of it."""
    for place, x in enumerate((a, b)):
        if not isinstance(x, Tile):
            raise KernelFaultError("operand", f"{operation} takes tiles: got {type(x).__name__}", executed())
        found = x.layout
        if found is None or acc.layout is None:
            continue
        if not isinstance(found, gl.DotOperandLayout) or (found.operand_index, found.parent) != (place, acc.layout):
            message = f"operand {place} of {operation} is in {found}: expected DotOperandLayout({place}, {acc.layout})"
            raise KernelFaultError("layouts differ", message, executed())
    if acc.layout is not None and not isinstance(acc.layout, layout):
        message = f"{operation} adds to {layout.__name__}, not to {acc.layout}"
        raise KernelFaultError("layouts differ", message, executed())
    check_operands(a, b, acc, operation)


def mma_v2(a: Any, b: Any, acc: Any, input_precision: Any = None) -> Tile:
    """acc + a @ b by the warps of Ampere and later, all of them in registers."""
    _in_registers(a, b, acc, gl.NVMMADistributedLayout, "mma_v2")
    if acc.layout is not None and list(acc.layout.version) != [2, 0]:
        message = f"mma_v2 adds to a layout of version [2, 0], not {acc.layout.version}"
        raise KernelFaultError("layouts differ", message, executed())
    _check_accumulator(a, acc, "mma_v2")
    if a.layout is not None and b.layout is not None and acc.layout is not None:
        if a.layout.k_width * a.dtype.primitive_bitwidth < OPERAND_BITS:
            _refuse(f"k_width is {a.layout.k_width}: expected {OPERAND_BITS} bits at least", "mma_v2", tile_type(a))
        ask("mma_v2", *map(tile_type, (a, b, acc)))
    total = plain(acc) + matrix_product(plain(a), plain(b), input_precision, "mma_v2")
    return Tile(total.to(acc.kind), acc.layout)


def dot_fma(a: Any, b: Any, acc: Any) -> Tile:
    """acc + a @ b without matrix units: fp32 stays fp32."""
    _in_registers(a, b, acc, gl.BlockedLayout, "dot_fma")
    if not a.kind is b.kind is acc.kind:
        _refuse("operands and accumulator have one dtype", "dot_fma", a.dtype, b.dtype, acc.dtype)
    if a.layout is not None and b.layout is not None and acc.layout is not None:
        ask("dot_fma", *map(tile_type, (a, b, acc)))
    wide = torch.float64 if acc.kind is torch.float64 else torch.float32
    return Tile((plain(acc).to(wide) + plain(a).to(wide) @ plain(b).to(wide)).to(acc.kind), acc.layout)
