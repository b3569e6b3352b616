"""Triton's own code for layouts, which needs no GPU: what it makes of an operation, and what it refuses."""

import atexit
import contextlib
import functools
import math
import operator
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import triton
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions, min_dot_size
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor, shared_memory_descriptor_type
from triton.experimental.gluon.language._semantic import GluonSemantic
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.offsets import written_bases
from tilewise._gluon.order import current

FP8 = ("fp8e5", "fp8e4nv", "fp8e4b15")
# Triton 3.6 ends the process when it is asked for a layout of shared memory as a linear one.
TELLS_OFFSETS = not triton.__version__.startswith("3.6.")


@functools.cache
def _context() -> Any:
    context = ir.context()
    ir.load_dialects(context)
    return context


def _new_builder(warps: int = 4, ctas: int = 1) -> Any:
    """Makes layouts and operations of Triton's, these in a module of its own."""
    made = gluon_ir.GluonOpBuilder(_context())
    # It does not keep its context alive.
    made.context = _context()
    made.options = CUDAOptions(
        num_warps=warps, num_ctas=ctas, supported_fp8_dtypes=FP8, max_num_imprecise_acc_default=2**30
    )
    made.codegen_fns = {"min_dot_size": min_dot_size(GPUTarget("cuda", 90, 32))}
    made.module = made.create_module()
    made.module.set_attr("ttg.target", made.get_string_attr("cuda:90"))
    for name, number in (("num-warps", warps), ("num-ctas", ctas), ("threads-per-warp", 32)):
        made.module.set_attr(f"ttg.{name}", made.get_int32_attr(number))
    function = made.get_or_insert_function(made.module, "asks", made.get_function_ty([], []), "public", False)
    made.module.push_back(function)
    made.set_insertion_point_to_start(function.add_entry_block())
    return made


@functools.cache
def builder() -> Any:
    """One for layouts."""
    return _new_builder()


# Triton 3.9 complains at the end of a process of what is still there.
atexit.register(_context.cache_clear)
atexit.register(builder.cache_clear)


def linear_layout(layout: Any, shape: list[int]) -> Any:
    """A layout as a linear one; those that are stay so."""
    if type(layout).__name__ in ("AutoLayout", "DistributedLinearLayout", "SharedLinearLayout"):
        return layout
    return builder().to_linear_layout(layout._to_ir(builder()), shape)


def bank_conflicts(layout: Any, shared: Any, shape: list[int], bits: int) -> int:
    """Of an access to shared memory in a layout by a tile in another, of elements of so many bits."""
    made = builder()
    return int(made.get_shared_bank_conflicts(layout._to_ir(made), shared._to_ir(made), shape, bits))


def offset_bases(layout: Any, shape: list[int]) -> list[list[int]]:
    """Which element of shared memory in a layout each bit of an offset leads to."""
    if hasattr(layout, "offset_bases"):
        return list(layout.offset_bases)
    if not TELLS_OFFSETS:
        return written_bases(layout, shape)
    return list(linear_layout(layout, shape).offset_bases)


class TileType(NamedTuple):
    """A tile, as Triton's compiler knows it."""

    dtype: Any
    shape: tuple[int, ...]
    layout: Any

    def __str__(self) -> str:
        return f"a tile of {self.dtype} {list(self.shape)} in {self.layout}"


class SharedType(NamedTuple):
    """A view of shared memory, likewise; `whole` is the shape of what it is a slice of."""

    dtype: Any
    shape: tuple[int, ...]
    layout: Any
    whole: tuple[int, ...]

    def __str__(self) -> str:
        return f"shared memory of {self.dtype} {list(self.shape)} in {self.layout}"


def tile_type(x: Any) -> TileType:
    """A tile, as Triton's compiler knows it."""
    return TileType(x.dtype, tuple(x.shape), x.layout)


def left_open(layout: Any) -> bool:
    """Whether it is the compiler that finds a layout."""
    return type(layout).__name__ in ("AutoLayout", "CoalescedLayout")


QUESTIONS: dict[str, Callable[..., Any]] = {
    # What is checked of a tile, wherever it comes from.
    "tile": lambda s, x: s.convert_layout(x, x.type.layout),
    "convert_layout": lambda s, *of: s.convert_layout(*of),
    "reshape": lambda s, x, shape: s.reshape(x, list(shape), False),
    "permute": lambda s, x, axes: s.permute(x, axes),
    "expand_dims": lambda s, x, axis: s.expand_dims(x, axis),
    "join": lambda s, x, y: s.join(x, y),
    "split": lambda s, x: s.split(x),
    "gather": lambda s, *of: s.gather(*of),
    "allocate_shared_memory": lambda s, dtype, shape, layout: s.allocate_shared(dtype, list(shape), layout, None),
    "load": lambda s, smem, layout: s.shared_load(smem, layout),
    "store": lambda s, smem, x: s.shared_store(smem, x),
    "gather of shared memory": lambda s, *of: s.shared_gather(*of),
    "scatter to shared memory": lambda s, *of: s.shared_scatter(*of),
    "index": lambda s, smem: s.memdesc_index(smem, 0),
    "slice": lambda s, *of: s.memdesc_slice(*of),
    "permute of shared memory": lambda s, smem, order: s.memdesc_trans(smem, list(order)),
    "reshape of shared memory": lambda s, smem, shape: s.memdesc_reshape(smem, list(shape)),
    "reinterpret": lambda s, smem, dtype, shape, layout: s.memdesc_reinterpret(smem, dtype, list(shape), layout),
    "warpgroup_mma": lambda s, *of: warpgroup_mma(*of, _semantic=s),
    "mma_v2": lambda s, *of: mma_v2(*of, _semantic=s),
    "dot_fma": lambda s, *of: gl.dot_fma(*of, _semantic=s),
}


def ask(question: str, *operands: Any, ctas: int | None = None) -> Any:
    """The type of what an operation of Triton's gives, or types; what the compiler refuses is a fault.

    Tiles are those of all CTAs that run here, shared memory is one CTA's, unless `ctas` says otherwise.
    """
    agent = current()
    if ctas is None:
        ctas = 1 if any(isinstance(x, SharedType) for x in operands) else len(agent.members) or 1
    try:
        return _answer(question, operands, agent.warps, ctas)
    except _RefusedError as refused:
        what = " and ".join(map(str, operands))
        message = f"{refused}: {what if question == 'tile' else f'{question} of {what}'}"
        raise KernelFaultError("refused", message, executed()) from None


class _RefusedError(Exception):
    """With the compiler's words."""


@functools.lru_cache(maxsize=4096)
def _answer(question: str, operands: tuple[Any, ...], warps: int, ctas: int) -> Any:
    made = _new_builder(warps, ctas)
    try:
        for x in operands:
            _check(getattr(x, "layout", x))
        result = QUESTIONS[question](GluonSemantic(made), *(_value(made, x) for x in operands))
        made.ret([])
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _RefusedError(str(error).partition("\n")[0]) from None
    with _written_by_triton() as file:
        right = made.module.verify()
        file.seek(0)
        words = file.read()
    if not right:
        # Of a layout for other threads the second line says so.
        said = re.search(r"(Layout has .*)", words) or re.search(r"error: (?:'[^']*' op )?(.*)", words)
        raise _RefusedError(said[1] if said else "the operation is not valid")
    return tuple(map(_type_of, result)) if isinstance(result, tuple) else _type_of(result)


def _check(layout: Any) -> None:
    """What Triton's code does not refuse but ends the process for."""
    if isinstance(layout, gl.SliceLayout):
        _check(layout.parent)
    if isinstance(layout, gl.DistributedLinearLayout):
        reached = {(0,) * len(layout.shape)}
        for basis in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases, *layout.block_bases):
            reached |= {tuple(map(operator.xor, place, basis)) for place in reached}
        if len(reached) != math.prod(layout.shape):
            raise ValueError(f"its bases reach {len(reached)} elements of {math.prod(layout.shape)}")
    if isinstance(layout, gl.DotOperandLayout):
        if layout.k_width & (layout.k_width - 1):
            raise ValueError(f"k_width is {layout.k_width}: expected a power of two")
        # Of the accumulator it is the warps alone that matter.
        if isinstance(layout.parent, gl.NVMMADistributedLayout) and layout.parent.version[0] not in (2, 3):
            raise ValueError(f"an operand of version {layout.parent.version}: expected [2, 0] or, of Hopper, [3, 0]")
    if isinstance(layout, gl.NVMMADistributedLayout):
        version, shape, rank = list(layout.version), list(layout.instr_shape), len(layout.warps_per_cta)
        if version[0] not in (2, 3) or (version[0] == 3 and rank != 2):
            message = f"version {version} of NVMMADistributedLayout, of {rank} axes: expected [2, 0]"
            raise ValueError(f"{message} or, of Hopper and of two axes, [3, 0]")
        # Hopper's ends with K.
        sizes = shape[-2:] if version[0] == 2 else shape[:2]
        if len(shape) < rank or (version[0] == 2 and len(shape) > rank) or any(n < 8 or n & (n - 1) for n in sizes):
            expected = f"{[1] * (rank - 2) + [16, 8]}" if version[0] == 2 else "[16, n, k]"
            raise ValueError(f"instr_shape {shape} of version {version}: expected {expected}, powers of two from 8 on")


@contextlib.contextmanager
def _written_by_triton() -> Iterator[Any]:
    """A file with what C++ code writes to stderr: there Triton says why it refuses something."""
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _value(made: Any, operand: Any) -> Any:
    """A value of a type, whatever it may be."""
    if isinstance(operand, TileType):
        kind = gl.distributed_type(operand.dtype, list(operand.shape), operand.layout)
        return gl.tensor(made.create_poison(kind.to_ir(made)), kind)
    if isinstance(operand, SharedType):
        shared = shared_memory_descriptor_type(operand.dtype, list(operand.shape), operand.layout, list(operand.whole))
        return shared_memory_descriptor(made.create_poison(shared.to_ir(made)), **shared.__dict__)
    return operand


def _type_of(result: Any) -> Any:
    if isinstance(result, shared_memory_descriptor):
        kind = result.type
        return SharedType(kind.element_ty, tuple(kind.shape), kind.layout, tuple(kind.alloc_shape))
    if isinstance(result, gl.tensor):
        return TileType(result.dtype, tuple(result.type.get_block_shapes()), result.type.layout)
    return None
