"""Products of tiles, as the matrix units of Ampere and Hopper take their operands."""

from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.values import FP8, Tile, plain

# What is left of an fp32 operand's bits: 10 of the mantissa's 23. The others are not looked at.
TF32 = ~0x1FFF


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
    if a.dtype != b.dtype and not {a.dtype.name, b.dtype.name} <= FP8.keys():
        raise KernelFaultError("dtypes differ", f"{operation} of {a.dtype} and {b.dtype}", lines)
    if a.dtype.is_int() != acc.dtype.is_int():
        raise KernelFaultError("dtypes differ", f"{operation} of {a.dtype} into {acc.dtype}", lines)
    if a.shape != [acc.shape[0], b.shape[0]] or b.shape[1] != acc.shape[1]:
        raise KernelFaultError("shapes differ", f"{operation} of {a.shape}, {b.shape} into {acc.shape}", lines)


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
    total = plain(acc) + matrix_product(plain(a), plain(b), input_precision, "mma_v2")
    return Tile(total.to(acc.kind), acc.layout)


def dot_fma(a: Any, b: Any, acc: Any) -> Tile:
    """acc + a @ b without matrix units: fp32 stays fp32."""
    _in_registers(a, b, acc, gl.BlockedLayout, "dot_fma")
    wide = torch.float64 if acc.kind is torch.float64 else torch.float32
    return Tile((plain(acc).to(wide) + plain(a).to(wide) @ plain(b).to(wide)).to(acc.kind), acc.layout)
