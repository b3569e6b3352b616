"""What `gl` has, and `tl` where kernels use it, on tiles."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise._gluon import compiler, values
from tilewise._gluon.allocation import Allocation
from tilewise._gluon.compiler import ask, tile_type
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.leaving_out import DEPTH, Study, synchronises
from tilewise._gluon.order import Barrier, current
from tilewise._gluon.products import dot_fma
from tilewise._gluon.scans import REDUCING
from tilewise._gluon.shapes import SHAPING, of_pointers_too
from tilewise._gluon.shared import Shared, allocated
from tilewise._gluon.values import Pointer, Tile, cast, compute, placed, plain, torch_dtype

# Of a Hopper SM, that a CTA can have.
SHARED_BYTES = 227 * 1024
# Loads of one number, one after the other, after which a loop is taken to wait for another.
PATIENCE = 50


def elementwise(of_tensor: Callable[..., Any], of_number: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tiles from one of tensors and one of numbers."""

    def call(*operands: Any, **_options: Any) -> Any:
        def function(*given: Any) -> Any:
            if any(isinstance(x, torch.Tensor) for x in given):
                return of_tensor(*(torch.as_tensor(x) for x in given))
            return of_number(*given)

        return compute(function, *operands)

    return call


def _of_number(function: Callable[[float], float]) -> Callable[[float], float]:
    def call(x: float) -> float:
        try:
            return function(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return -math.inf if x == 0 else math.nan

    return call


def where(mask: Any, x: Any, y: Any) -> Any:
    """x where the mask holds, else y."""
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        raise KernelFaultError("not simulated", "where() of pointers", executed())
    condition = plain(mask)
    layout = values.common_layout((mask, x, y))

    def choose(a: Any, b: Any) -> Any:
        if isinstance(condition, torch.Tensor):
            a, b = (v if isinstance(v, torch.Tensor) else _as_tensor(v, a, b) for v in (a, b))
            return torch.where(condition, a, b)
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            a, b = torch.broadcast_tensors(*(torch.as_tensor(v) for v in (a, b)))
        return a if condition else b

    result = compute(choose, x, y)
    if isinstance(result.data, torch.Tensor):
        result.layout = layout
    return result


def _as_tensor(number: Any, *others: Any) -> torch.Tensor:
    dtype = next((x.dtype for x in others if isinstance(x, torch.Tensor)), None)
    return torch.tensor(number, dtype=dtype or values.kind_of(number))


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tile:
    """A tile of one number."""
    sizes = [operator.index(n) for n in shape]
    return Tile(torch.full(sizes, plain(value), dtype=torch_dtype(dtype)), placed(sizes, layout))


def full_like(x: Any, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tile:
    """A tile of one number, of x's shape."""
    return full(shape or x.shape, value, dtype or x.dtype, layout or x.layout)


def zeros_like(x: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Tile:
    """Zeros of x's shape."""
    return full_like(x, 0, shape, dtype, layout)


def arange(start: Any, end: Any, layout: Any = None) -> Tile:
    """From start up to end."""
    data = torch.arange(operator.index(start), operator.index(end), dtype=torch.int32)
    return Tile(data, placed(data.shape, layout))


def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Tile:
    """The same values, held by other threads; or by the same, where it is asserted that the conversion is trivial."""
    if not getattr(x, "shape", None):
        raise KernelFaultError("refused", "convert_layout of a number: expected a tile", executed())
    found = placed(x.shape, layout)
    if found is not None and x.layout is not None:
        ask("convert_layout", tile_type(x), layout, bool(assert_trivial))
    return Tile(plain(x), found)


def check_layouts(pointer: Any, *others: Any) -> None:
    """Of a tile of pointers and what goes with it."""
    if pointer.shape:
        values.common_layout((Tile(pointer.offset, pointer.layout), *others))


def load(pointer: Any, mask: Any = None, other: Any = None, **_options: Any) -> Tile:
    """From global memory. What the mask leaves out is `other`, and anything without one."""
    agent, memory = current(), pointer.memory
    check_layouts(pointer, mask, other)
    offset, wanted, region = pointer.region(mask)
    if not pointer.shape and wanted is None:
        # A loop that waits for a number looks again and again.
        agent.look(memory, int(pointer.offset), PATIENCE)
    memory.read(region, agent)
    if wanted is None:
        return Tile(memory.flat[offset], pointer.layout)
    missing = torch.tensor(_junk(memory.flat.dtype), dtype=memory.flat.dtype)
    if other is not None:
        missing = torch.as_tensor(plain(other)).to(memory.flat.dtype)
    found = memory.flat[torch.where(wanted, offset, 0)] if memory.flat.numel() else missing.broadcast_to(offset.shape)
    return Tile(torch.where(wanted, found, missing), pointer.layout)


def _junk(dtype: torch.dtype) -> float:
    """What nothing has written."""
    return math.nan if dtype.is_floating_point else 45


def store(pointer: Any, value: Any, mask: Any = None, **_options: Any) -> None:
    """To global memory."""
    agent, memory = current(), pointer.memory
    check_layouts(pointer, value, mask)
    offset, wanted, region = pointer.region(mask)
    # A scalar is stored by the thread that also arrives.
    memory.write(region, agent, None if pointer.shape else (agent.number, agent.time))
    data = torch.as_tensor(plain(value)).to(memory.flat.dtype).broadcast_to(offset.shape)
    memory.flat[region.offsets] = data.reshape(-1) if wanted is None else data[wanted]
    agent.machine.changed(memory)


def _order(order: str, study: Study | None) -> str:
    """What an atomic orders; nothing where that is left out."""
    if study is None or order == "relaxed":
        return order
    lines = executed()[:DEPTH]
    study.statements.setdefault(lines, f"atomic's {order}")
    return "relaxed" if lines == study.left_out else order


def _atomic(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """An atomic from a function of what is there and of its operands."""

    def call(pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tile:
        return _change(function, pointer, (value,), mask, sem, scope)

    return call


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Tile:
    """Exchange what equals `cmp`."""

    def exchange(old: torch.Tensor, expected: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return torch.where(old == expected, new, old)

    return _change(exchange, pointer, (cmp, val), None, sem, scope)


def _change(
    function: Callable[..., torch.Tensor], pointer: Any, operands: tuple[Any, ...], mask: Any, sem: Any, scope: Any
) -> Tile:
    if scope not in (None, "gpu", "sys"):
        raise KernelFaultError("not simulated", f"an atomic of scope {scope}", executed())
    agent, memory = current(), pointer.memory
    order = _order(sem or "acq_rel", agent.machine.study)
    agent.pause()
    check_layouts(pointer, *operands, mask)
    offset, wanted, region = pointer.region(mask)
    data = [torch.as_tensor(plain(x)).to(memory.flat.dtype).broadcast_to(offset.shape) for x in operands]
    data = [x.reshape(-1) if wanted is None else x[wanted] for x in data]
    alone = region.offsets.numel() == 1
    place = int(region.offsets[0]) if alone else 0
    if alone:
        now = memory.flat[region.offsets]
        if torch.equal(function(now, *data), now):
            agent.look(memory, place, 1)
        else:
            agent.polled = None
    if order in ("acquire", "acq_rel") and alone:
        memory.acquire(place, agent)
    memory.change(region, agent, None if pointer.shape else (agent.number, agent.time))
    old = _apply(function, memory.flat, region.offsets, data)
    if order in ("release", "acq_rel") and alone:
        memory.release(place, agent)
    agent.machine.changed(memory)
    if wanted is None:
        return Tile(old.reshape(offset.shape), pointer.layout)
    result = torch.zeros(offset.shape, dtype=memory.flat.dtype)
    result[wanted] = old
    return Tile(result, pointer.layout)


def _apply(
    function: Callable[..., torch.Tensor], flat: torch.Tensor, offsets: torch.Tensor, data: list[torch.Tensor]
) -> torch.Tensor:
    """What was at each place before its own change. Places may repeat: one after the other."""
    old = flat[offsets].clone()
    if offsets.numel() < 2 or len(offsets.unique()) == offsets.numel():
        flat[offsets] = function(old, *data)
        return old
    for i, place in enumerate(offsets.tolist()):
        old[i] = flat[place]
        flat[place] = function(flat[place].clone(), *(x[i] for x in data))
    return old


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    """Shared memory of the CTA, until it ends: NaN, or a strange number, until it is written."""
    cta, sizes = current().cta, [operator.index(n) for n in shape]
    lines = executed()
    # A helper's line says little: that of its caller.
    name = f"{lines[1] if len(lines) > 1 else lines[0]}, {sizes}{cta.label}"
    cta.allocate(lines, math.prod(sizes) * element_ty.primitive_bitwidth // 8)
    if isinstance(layout, mbarrier.MBarrierLayout):
        return BarrierArray([Barrier(f"barrier {i} of {name}") for i in range(sizes[0])])
    dtype = torch_dtype(element_ty)
    data = torch.full(sizes, _junk(dtype), dtype=dtype)
    result = Shared(data, Allocation(data, layout, name).base, allocated(element_ty, sizes, layout))
    if value is not None:
        result.store(value)
    return result


class Outside:
    """A barrier beyond an array's, which is a fault where it is used: not where a predicate is false."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise KernelFaultError("out of bounds", self._what, executed())


class BarrierArray:
    """Barriers in shared memory."""

    def __init__(self, barriers: list[Barrier]) -> None:
        self._barriers = barriers

    def index(self, i: Any) -> Any:
        """One of them."""
        i = operator.index(i)
        return self._barriers[i] if 0 <= i < len(self._barriers) else Outside(f"barrier {i} of {len(self._barriers)}")

    def one(self) -> Barrier:
        """Of an array of one, that one."""
        if len(self._barriers) > 1:
            message = f"{len(self._barriers)} barriers, of which one is used: expected index(i)"
            raise KernelFaultError("refused", message, executed())
        return self._barriers[0]


def one_barrier(x: Any) -> Barrier:
    """A barrier, also where a kernel has not indexed its array of one."""
    if isinstance(x, Shared):
        message = f"a barrier in {x.layout}: expected mbarrier.MBarrierLayout()"
        raise KernelFaultError("not simulated", message, executed())
    return x.one() if isinstance(x, BarrierArray) else x


@synchronises("thread barrier")
def thread_barrier(cluster: bool = False) -> None:
    """All threads of the partition meet; in a cluster of one CTA that is its barrier as well."""
    current().meet()


def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    """The first function in the warps that are there, each other one in warps of its own."""
    first, *others = functions_and_args
    # The compiler has all threads meet there.
    current().meet()
    return current().specialize(first, others, list(worker_num_warps))


def set_auto_layout(x: Any, layout: Any) -> Tile:
    """A layout for a tile that has none yet."""
    if x.layout is not None:
        message = f"set_auto_layout of a tile in {x.layout}: expected one without a layout"
        raise KernelFaultError("layouts differ", message, executed())
    return Tile(plain(x), placed(x.shape, layout), x.kind)


def static_print(*words: Any, **options: Any) -> None:
    """Once a launch, as a compiler would."""
    agent, lines = current(), executed()
    if lines not in agent.machine.printed:
        agent.machine.printed.add(lines)
        print(*map(plain, words), **options)


def device_print(prefix: Any, *values: Any, hex: Any = False) -> None:
    """By each CTA, or by each of its partitions."""
    print(f"pid {current().cta.index} {prefix}", *(plain(value) for value in values))


def bank_conflicts(distr_ty: Any, shared_ty: Any) -> int:
    """By how many accesses more than needed a tile is loaded from shared memory, or stored there."""
    if list(distr_ty.shape) != list(shared_ty.shape):
        message = f"bank_conflicts of a tile of {distr_ty.shape} and shared memory of {shared_ty.shape}"
        raise KernelFaultError("shapes differ", message, executed())
    dtype = getattr(distr_ty, "element_ty", None) or distr_ty.dtype
    return compiler.bank_conflicts(distr_ty.layout, shared_ty.layout, list(distr_ty.shape), dtype.primitive_bitwidth)


def linear_layout(layout: Any, shape: Any) -> Any:
    """A layout as a linear one."""
    return compiler.linear_layout(layout, [operator.index(n) for n in shape])


def static_assert(condition: Any, message: Any = "") -> None:
    """Of what is known when a kernel is compiled."""
    if not condition:
        raise KernelFaultError("assertion", f"static_assert {message}".rstrip(), executed())


def device_assert(condition: Any, message: Any = "", **_options: Any) -> None:
    """Of a value of the kernel."""
    found = plain(condition)
    if not (bool(found.all()) if isinstance(found, torch.Tensor) else found):
        raise KernelFaultError("assertion", f"device_assert {message}".rstrip(), executed())


def _extremum(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    # Of a number and a NaN, the number.
    def of_two(x: Any, y: Any) -> Any:
        return y if x != x else x if y != y else of_numbers(x, y)

    def of_tiles(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kind = x.dtype if x.dim() else y.dtype
        return of_tensors(x.to(kind), y.to(kind))

    return elementwise(of_tiles, of_two)


LANGUAGE: dict[str, Any] = {
    "allocate_shared_memory": allocate_shared_memory,
    "warp_specialize": warp_specialize,
    "barrier": thread_barrier,
    "thread_barrier": thread_barrier,
    "arange": arange,
    "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype, layout),
    "zeros_like": zeros_like,
    "full_like": full_like,
    "to_tensor": lambda x: x if isinstance(x, Tile) else Tile(x),
    "cast": cast,
    "convert_layout": of_pointers_too(convert_layout),
    "set_auto_layout": of_pointers_too(set_auto_layout),
    "where": where,
    "maximum": _extremum(torch.fmax, max),
    "minimum": _extremum(torch.fmin, min),
    "exp2": elementwise(torch.exp2, _of_number(lambda x: 2.0**x)),
    "exp": elementwise(torch.exp, _of_number(math.exp)),
    "log2": elementwise(torch.log2, _of_number(math.log2)),
    "log": elementwise(torch.log, _of_number(math.log)),
    "sqrt": elementwise(torch.sqrt, _of_number(math.sqrt)),
    "rsqrt": elementwise(torch.rsqrt, _of_number(lambda x: math.inf if x == 0 else 1 / math.sqrt(x))),
    "sin": elementwise(torch.sin, math.sin),
    "cos": elementwise(torch.cos, math.cos),
    "erf": elementwise(torch.erf, math.erf),
    "floor": elementwise(torch.floor, math.floor),
    "ceil": elementwise(torch.ceil, math.ceil),
    "fdiv": lambda x, y, ieee_rounding=False: x / y,
    "div_rn": lambda x, y: x / y,
    "sqrt_rn": elementwise(lambda x: x.double().sqrt().to(x.dtype), _of_number(math.sqrt)),
    "add": lambda x, y, *_options: x + y,
    "sub": lambda x, y, *_options: x - y,
    "mul": lambda x, y, *_options: x * y,
    "dot_fma": dot_fma,
    "bank_conflicts": bank_conflicts,
    "to_linear_layout": linear_layout,
    "fma": elementwise(values.fused, lambda x, y, z: x * y + z),
    "abs": elementwise(torch.abs, abs),
    "cdiv": lambda x, y: (x + y - 1) // y,
    **REDUCING,
    **SHAPING,
    "load": load,
    "store": store,
    "atomic_cas": atomic_cas,
    "atomic_add": _atomic(operator.add),
    "atomic_max": _atomic(torch.maximum),
    "atomic_min": _atomic(torch.minimum),
    "atomic_and": _atomic(operator.and_),
    "atomic_or": _atomic(operator.or_),
    "atomic_xor": _atomic(operator.xor),
    "atomic_xchg": _atomic(lambda _old, new: new),
    "program_id": lambda axis: Tile(current().cta.index[operator.index(axis)]),
    "num_programs": lambda axis: Tile(current().cta.grid[operator.index(axis)]),
    "num_warps": lambda: current().warps,
    "num_ctas": lambda: len(current().members) or 1,
    "static_range": range,
    "static_assert": static_assert,
    "static_print": static_print,
    "device_assert": device_assert,
    "device_print": device_print,
    "assume": lambda _condition: None,
    "multiple_of": lambda x, *_values: x,
    "max_contiguous": lambda x, *_values: x,
    "max_constancy": lambda x, *_values: x,
}
