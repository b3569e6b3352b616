"""Each instruction that the simulation of Gluon knows, in a case of its own: small tiles in, one tensor out.

The results of an H200 are kept in data/h200_instructions.npz: `python tests/gluon_instructions.py FILE.npz` writes
those of the machine that it runs on.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gluon_language_cases
import gluon_newer_cases
import numpy as np
import torch
import triton
from gluon_instruction_kernels import (
    atomics_kernel,
    binary_kernel,
    cast_kernel,
    described_kernel,
    fences_kernel,
    grid_kernel,
    memory_kernel,
    product_kernel,
    reduce_kernel,
    shapes_kernel,
    shared_kernel,
    specialized_kernel,
    tma_kernel,
    unary_kernel,
)
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

H200 = Path(__file__).parent / "data" / "h200_instructions.npz"
COUNT, SIDE = 128, 64
F16, BF16, F32, I32, I64, I8 = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.int8,
)
# How many steps of fp32 an approximation of a GPU may be off: two, as PTX promises of exp2; and exp's, by the rounding
# of x · log2(e) before exp2, half a step for each unit of x.
APPROXIMATE = dict.fromkeys(("exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "truediv"), 2) | {"exp": 16}


class Case(NamedTuple):
    """An instruction, or one use of it: what runs it, and how many steps of its dtype the result may be off."""

    run: Callable[[torch.device], torch.Tensor]
    steps: int = 0


def numbers(dtype: torch.dtype, seed: int = 0, count: int = COUNT) -> torch.Tensor:
    """Numbers of a dtype, odd ones first."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        found = torch.randint(-100, 100, (count,), generator=generator)
        found[:6] = torch.tensor([0, 1, -1, info.max, info.min, info.max - 1])
        return found.to(dtype)
    found = torch.randn(count, generator=generator) * 10
    found[:10] = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 0.5, 2.5, -1e-3])
    return found.to(dtype)


def pairs(dtype: torch.dtype, other: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two operands: every odd number meets every other."""
    x, y = numbers(dtype), numbers(other, 1)
    x[10:110], y[10:110] = x[:10].repeat(10), y[:10].repeat_interleave(10)
    return x, y


def matrix(dtype: torch.dtype, seed: int = 0, rows: int = SIDE, columns: int = SIDE) -> torch.Tensor:
    """Random numbers that sums of products are exact for: small multiples of a quarter."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 8, (rows, columns), generator=generator) / 4).to(dtype)


def described(x: torch.Tensor, block: tuple[int, int] = (SIDE, SIDE)) -> TensorDescriptor:
    """A descriptor of tiles of that size."""
    layout = gl.NVMMASharedLayout.get_default_for(
        list(block), {F16: gl.float16, BF16: gl.bfloat16, F32: gl.float32}[x.dtype]
    )
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def _unary(name: str, dtype: torch.dtype) -> Callable[[torch.device], torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x = numbers(dtype).to(device)
        if name == "log" or name == "log2" or name == "sqrt" or name == "rsqrt":
            # Of negative numbers: NaN everywhere.
            x[20:] = x[20:].abs()
        out = torch.full((COUNT,), 77, dtype=dtype, device=device)
        unary_kernel[(1,)](x, out, name)
        return out

    return run


def _binary(name: str, dtypes: tuple[torch.dtype, torch.dtype], result: torch.dtype) -> Callable[..., torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x, y = pairs(*dtypes)
        if name in ("lshift", "rshift"):
            y = y.abs() % 31
        elif not y.is_floating_point() and name in ("floordiv", "mod"):
            # A division by 0, or of the least number by -1, is anything.
            y = torch.where((y == 0) | (y == -1), 3, y)
        out = torch.full((COUNT,), 77, dtype=result, device=device)
        binary_kernel[(1,)](x.to(device), y.to(device), out, name)
        return out

    return run


def _cast(source: torch.dtype, target: torch.dtype, how: str) -> Callable[[torch.device], torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x = numbers(source)
        if source.is_floating_point and not target.is_floating_point:
            # Of what the target does not hold a conversion is anything.
            x = x.nan_to_num(0, 0, 0)
        out = torch.full((COUNT,), 77, dtype=target, device=device)
        cast_kernel[(1,)](x.to(device), out, how)
        return out

    return run


def _reduce(name: str, axis: int | None, dtype: torch.dtype) -> Callable[[torch.device], torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x = matrix(dtype)
        if dtype.is_floating_point and name != "sum":
            x[3, :5], x[7] = torch.nan, torch.nan
            x[9, 1] = torch.inf
        out = torch.full((SIDE if axis is not None else 1,), 77.0, device=device)
        reduce_kernel[(1,)](x.to(device), out, name, 2 if axis is None else axis)
        return out

    return run


def _small(kernel: object, name: str, dtype: torch.dtype = I32, count: int = COUNT) -> Callable[..., torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x = numbers(dtype, 2, count).to(device)
        out = torch.full((count,), 77, dtype=dtype, device=device)
        kernel[(1,)](x, out, name)  # type: ignore[index]
        return out

    return run


def _grid(device: torch.device) -> torch.Tensor:
    out = torch.zeros(2, 3, 2, 8, dtype=I32, device=device)
    grid_kernel[(2, 3, 2)](out)
    return out


def _copies(name: str, dtype: torch.dtype, start: tuple[int, int]) -> Callable[[torch.device], torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        x = matrix(dtype, 3, 100, 72).to(device)
        out = torch.full((100, 72), 77, dtype=dtype, device=device)
        tma_kernel[(1,)](described(x), described(out), *start, name)
        return out

    return run


def _described(device: torch.device) -> torch.Tensor:
    x = matrix(F16, 3, 100, 72).to(device)
    out = torch.full((100, 72), 77, dtype=F16, device=device)
    triton.set_allocator(lambda size, _align, _stream: torch.empty(size, dtype=I8, device=device))
    described_kernel[(1,)](x, out, described(x).layout)
    return out


def _product(name: str, dtype: torch.dtype) -> Callable[[torch.device], torch.Tensor]:
    def run(device: torch.device) -> torch.Tensor:
        a, b = matrix(dtype, 4).to(device), matrix(dtype, 5).to(device)
        out = torch.full((SIDE, SIDE), 77.0, device=device)
        product_kernel[(1,)](described(a), described(b), out, name)
        return out

    return run


def _fences(device: torch.device) -> torch.Tensor:
    x, out = matrix(F16, 6).to(device), torch.full((SIDE, SIDE), 77, dtype=F16, device=device)
    fences_kernel[(1,)](x, described(out))
    return out


UNARY = ("neg", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil")
ARITHMETIC = ("add", "sub", "mul", "truediv")
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne", "where")
WHOLE = ("floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "cdiv")
SHAPES = (
    "expand_dims",
    "reshape",
    "permute",
    "convert_layout",
    "zeros_like",
    "full_like",
    "full",
    "arange",
    "to_tensor",
)
SHARED = ("index", "slice", "permute", "reshape", "initial")
ATOMICS = ("add", "max", "min", "and", "or", "xor", "xchg", "cas", "masked", "scalar")
CORNERS = ((0, 0), (64, 64), (-8, 8), (8, -8), (99, 56), (200, 0))


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its name."""
    for name in UNARY:
        yield f"{name} fp32", Case(_unary(name, F32), APPROXIMATE.get(name, 0))
    for dtype in (F16, BF16):
        for name in ("neg", "abs"):
            yield f"{name} {short(dtype)}", Case(_unary(name, dtype))
    for name in ("neg", "abs", "invert"):
        yield f"{name} int32", Case(_unary(name, I32))
    for name in (*ARITHMETIC, "maximum", "minimum", "fma", "mod"):
        yield f"{name} fp32", Case(_binary(name, (F32, F32), F32), APPROXIMATE.get(name, 0))
    for x, y in (
        (F16, F16),
        (BF16, BF16),
        (F16, BF16),
        (F16, F32),
        (BF16, I32),
        (F32, I32),
        (I32, I64),
        (I8, I32),
        (I8, I8),
    ):
        for name in (*ARITHMETIC[:3], "maximum", "minimum"):
            yield f"{name} {short(x)} {short(y)}", Case(_binary(name, (x, y), F32 if x.is_floating_point else I64))
        yield f"truediv {short(x)} {short(y)}", Case(_binary("truediv", (x, y), F32), APPROXIMATE["truediv"])
    for name in WHOLE:
        yield f"{name} int32", Case(_binary(name, (I32, I32), I32))
    for dtype in (F32, I32, BF16):
        for name in COMPARED:
            yield f"{name} {short(dtype)}", Case(_binary(name, (dtype, dtype), I32))
    for source, target in (
        (F32, F16),
        (F32, BF16),
        (F16, F32),
        (BF16, F32),
        (F32, I32),
        (I32, F32),
        (I32, I8),
        (I32, I64),
        (I64, I32),
        (I8, I32),
        (F16, BF16),
        (BF16, F16),
    ):
        yield f"cast {short(source)} {short(target)}", Case(_cast(source, target, "to"))
    yield "bitcast fp32 int32", Case(_cast(F32, I32, "bitcast"))
    for name in ("sum", "max", "min"):
        for dtype in (F32, F16, I32):
            for axis in (0, 1, None):
                yield f"{name} {short(dtype)} axis {axis}", Case(_reduce(name, axis, dtype))
    for name in SHAPES:
        yield name, Case(_small(shapes_kernel, name))
    for name in ("load", "load masked", "load other", "store masked", "scalars", "int64 offsets"):
        yield name, Case(_small(memory_kernel, name))
    yield "program_id, num_programs, num_warps", Case(_grid)
    for name in ATOMICS:
        yield f"atomic {name}", Case(_small(atomics_kernel, name))
    yield "atomic add fp32", Case(_small(atomics_kernel, "add", F32))
    for name in SHARED:
        yield f"shared {name}", Case(_small(shared_kernel, name))
    for dtype in (F16, BF16, F32):
        for corner in CORNERS:
            yield f"tma {short(dtype)} at {corner}", Case(_copies("both", dtype, corner))
    if hasattr(tma, "make_tensor_descriptor"):
        yield "make_tensor_descriptor", Case(_described)
    yield "tma without predicate", Case(_copies("pred", F16, (0, 0)))
    for name in ("shared", "registers", "transposed", "added", "sync"):
        yield f"warpgroup_mma {name}", Case(_product(name, F16))
    yield "warpgroup_mma bf16", Case(_product("shared", BF16))
    yield "fence_async_shared", Case(_fences)
    yield "warp_specialize", Case(_small(specialized_kernel, "all"))
    for name, run in (*gluon_language_cases.cases(), *gluon_newer_cases.cases()):
        yield name, Case(run)


def short(dtype: torch.dtype) -> str:
    """Its name as Triton has it."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def kept(x: torch.Tensor) -> np.ndarray:
    """As NumPy keeps it, which knows no bf16."""
    x = x.detach().cpu()
    return (x.float() if x.dtype is BF16 else x).numpy()


if __name__ == "__main__":
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    np.savez_compressed(sys.argv[1], **{name: kept(case.run(where)) for name, case in cases()})
