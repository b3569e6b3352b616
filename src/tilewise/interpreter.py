"""Triton's interpreter, repaired: kernels on CPU tensors, in NumPy, for machines without a GPU.

As it comes (3.6 to 3.9) it computes bf16 on the raw bits, truncates fp32 to bf16, sorts 256 numbers in a second, fails
on `range(tensor)` with NumPy 2.4 (3.6), and mixes up launches of two threads.

The repair changes Triton for the whole process, so it happens only where a process interprets kernels: Triton reads
TRITON_INTERPRET when it is imported, and what it decided then holds. Three places repair: `use_where_no_gpu`, which the
command line and the pytest plugin call; an explicit `repair`; and the operators, when they are imported in a process
that interprets. A process that compiles for a GPU is never changed: there `repair` raises.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["idle", "interpreting", "quiet", "repair", "use_where_no_gpu"]

_VARIABLE = "TRITON_INTERPRET"
_repairing = threading.Lock()
_repaired = _set_here = False


def use_where_no_gpu() -> bool:
    """Have Triton interpret kernels where torch sees no GPU, and repair its interpreter.

    Call it before anything imports triton, which reads TRITON_INTERPRET only then. A TRITON_INTERPRET that is already
    set is left as it is. Without triton, or with a GPU, nothing happens.

    Returns:
        Whether this process interprets kernels.

    Raises:
        RuntimeError: where kernels should be interpreted and triton was imported to compile them.
    """
    global _set_here
    if not _has_triton() or not _wanted():
        return False
    if "triton" in sys.modules and not interpreting():
        raise RuntimeError(
            "triton is already imported, and reads TRITON_INTERPRET only then: "
            "call tilewise.interpreter.use_where_no_gpu() first, or set TRITON_INTERPRET=1 in the environment"
        )
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        _set_here = True
    repair()
    return True


def _has_triton() -> bool:
    try:
        return "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    except ImportError:
        # Its import is blocked.
        return False


def _wanted() -> bool:
    if _VARIABLE in os.environ:
        return os.environ[_VARIABLE].lower() in ("1", "true", "on", "yes", "y")
    import torch

    return not torch.cuda.is_available()


def set_here() -> bool:
    """Whether `use_where_no_gpu`, not the user, set TRITON_INTERPRET in this process."""
    return _set_here


def interpreting() -> bool:
    """Whether Triton was imported to interpret kernels, even if TRITON_INTERPRET has changed since.

    Triton decides for each function when it is defined: for its own library, that is when it was imported.
    """
    from triton.language import standard

    return any(type(value).__name__ == "InterpretedFunction" for value in vars(standard).values())


def repair() -> None:
    """Repair the interpreter of this process, once: a second call does nothing.

    Raises:
        RuntimeError: where this process compiles kernels. The repair replaces parts of Triton that compiling needs.
    """
    global _repaired
    with _repairing:
        if _repaired:
            return
        if not interpreting():
            raise RuntimeError(
                "this process compiles kernels, and repairing the interpreter would break that: set TRITON_INTERPRET=1 "
                "before triton is imported to interpret them"
            )
        _repair_range()
        _repair_bf16_arithmetic()
        _repair_bf16_reductions()
        _speed_up_sort()
        _speed_up_helpers()
        _speed_up_types()
        _speed_up_operators()
        # Around everything a launch does, including the helpers' bookkeeping.
        _repair_launches()
        _repaired = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Overflow to infinity and the like without NumPy's warnings, as on a GPU; in this thread alone.

    Repaired, the interpreter runs every launch like this.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        yield


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """Launches do nothing, in any thread: for what is asked of the code around kernels, such as the memory it takes."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    interpreter.GridExecutor.__call__ = lambda *_arguments, **_named: None
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch


def _repair_range() -> None:
    """`for i in range(tensor)`: NumPy 2.4 no longer turns an array of one element into an integer."""
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _repair_launches() -> None:
    """One launch at a time, without NumPy's warnings.

    A launch's grid and program, and the patched language, are global to the process: two threads would read each
    other's program numbers, and the first to end would remove the patch under the other.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    # A hook before a launch may launch too.
    launching = threading.RLock()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        with launching, quiet():
            return launch(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = call


def _speed_up_sort() -> None:
    """tl.sort with NumPy's own sort: step by step as on a GPU, 256 elements take a second."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    original = tl.sort

    def sort(x: Any, dim: int | None = None, descending: Any = False) -> Any:
        if x.dtype == tl.bfloat16:
            return original(x, dim, descending)
        values = np.sort(x.handle.data, axis=-1 if dim is None else dim)
        if bool(getattr(descending, "value", descending)):
            values = np.flip(values, axis=-1 if dim is None else dim)
        return tl.tensor(TensorHandle(values, x.handle.dtype), x.type)

    tl.sort = sort


def _speed_up_helpers() -> None:
    """Calls of one jitted function from another: each would patch triton's language again, which takes longer than most
    helpers.

    The launch has patched it already, unless the helper sees the language under another name.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def patch_lang(function: Any) -> Any:
        if languages(function) <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages(function))
        return original(function)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        patched.clear()
        try:
            return launch(self, *arguments, **named)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def _speed_up_types() -> None:
    """Caches what is recomputed for every value though it follows from its type: together more than half of the time.

    Sums of integers are also computed in 64 bits, for an assertion that only debugging makes.
    """
    import dataclasses

    import triton.language as tl
    from triton.runtime import interpreter

    core: Any = tl.core
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)

    in_numpy, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[Any, ...], dict[str, Any]] = {}
    plain = frozenset((int, float, bool, str, type(None), core.tensor, core.dtype))

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = in_numpy(dtype)
        return dtypes[name]

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    def same(self: Any, other: Any) -> Any:
        if self is other:
            return True
        other = unwrapped(other)
        return isinstance(other, core.dtype) and self.name == other.name

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(unwrapped(size) for size in unwrapped(shape)))
        if key in blocks:
            self.__dict__.update(blocks[key])
        else:
            make_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key in tensors:
            self.__dict__.update(tensors[key])
        else:
            make_tensor(self, handle, type)
            tensors[key] = {name: getattr(self, name) for name in ("shape", "numel")}
        self.handle, self.type, self.dtype = handle, type, type.scalar

    interpreter._get_np_dtype = numpy_dtype
    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = same
    core.block_type.__init__ = block
    core.tensor.__init__ = tensor


def _speed_up_operators() -> None:
    """Arithmetic and comparisons of the common types straight from NumPy, which broadcasts as Triton does.

    Triton checks types, casts and splats for every one of them: for small tiles, half of a kernel's time.

    Other types, and shapes that do not fit, go Triton's way; everything does while debugging, which looks for overflow.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    core: Any = tl.core
    handle_of, builder = interpreter.TensorHandle, interpreter.interpreter_builder
    if builder.options.debug:
        return

    def divide(a: Any, b: Any) -> Any:
        return (a - np.fmod(a, b)) // b

    compared = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    compared |= {"eq": np.equal, "ne": np.not_equal}
    combined = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    whole = {"floordiv": divide, "mod": np.fmod}
    arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    of_integers = compared | combined | whole | arithmetic
    by_type: dict[str, dict[str, Any]] = {
        "fp32": compared | arithmetic | {"truediv": np.divide},
        "int32": of_integers,
        "int64": of_integers,
        "int1": combined,
    }
    limits = {"int32": 1 << 31, "int64": 1 << 63}
    numbers = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
    # By operator and the operands' types: what to call, the result's scalar type, and what every such result has in
    # common; None: Triton's way.
    plans: dict[tuple[str, str, str], tuple[Any, Any, dict[str, Any]] | None] = {}

    def offset(width: int) -> Any:
        return lambda pointer, index: pointer + width * index.astype(np.uint64)

    def shaped(scalar: Any, a: Any, b: Any) -> Any:
        """The type of a result with this scalar type; None where the operands' shapes do not fit."""
        shapes = [tuple(x.type.shape) for x in (a, b) if x.type.is_block()]
        if not shapes:
            return scalar
        try:
            return core.block_type(scalar, list(np.broadcast_shapes(*shapes)))
        except ValueError:
            return None

    def plan(name: str, a: Any, b: Any) -> tuple[Any, Any, dict[str, Any]] | None:
        left, right = a.type.scalar, b.type.scalar
        if left.is_ptr() and name == "add" and right.name in limits:
            function, scalar = offset(max(1, left.element_ty.primitive_bitwidth // 8)), left
        elif left.name == right.name or (left.name in limits and right.name in limits):
            scalar = left if left.name == "int64" else right
            function = by_type.get(scalar.name, {}).get(name)
            scalar = tl.int1 if name in compared else scalar
        else:
            return None
        type = shaped(scalar, a, b) if function else None
        return (function, scalar, vars(core.tensor(None, type))) if type is not None else None

    def made(data: Any, scalar: Any, common: dict[str, Any]) -> Any:
        """A tensor without its constructors, which take longer than most sums."""
        handle, tensor = object.__new__(handle_of), object.__new__(core.tensor)
        handle.__dict__ = {"data": data, "dtype": scalar, "attr": {}}
        tensor.__dict__ = {**common, "handle": handle}
        return tensor

    def number(value: Any, like: Any) -> Any:
        """A Python number as NumPy's of the tensor's type; None where Triton converts it otherwise, or refuses."""
        kind, name = type(value), like.type.scalar.name
        if kind is int and name in limits:
            return numbers[name](value) if -limits[name] <= value < limits[name] else None
        return numbers[name](value) if name == "fp32" and kind in (int, float) else None

    def operator(name: str, reflected: bool, slow: Any) -> Any:
        def method(self: Any, other: Any) -> Any:
            other = other.value if type(other) is core.constexpr else other
            if type(other) is core.tensor:
                key = (name, self.type.name, other.type.name)
                if key not in plans:
                    plans[key] = plan(name, self, other)
                found, data = plans[key], other.handle.data
            else:
                data = number(other, self)
                if data is None:
                    return slow(self, other)
                key = (name, self.type.name, "")
                if key not in plans:
                    plans[key] = plan(name, self, self)
                found = plans[key]
            if found is None:
                return slow(self, other)
            function, scalar, common = found
            own = self.handle.data
            return made(function(data, own) if reflected else function(own, data), scalar, common)

        return method

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        for name in {**of_integers, "truediv": None}:
            scope.set_attr(tensor, f"__{name}__", operator(name, False, getattr(tensor, f"__{name}__")))
            if name not in compared:
                scope.set_attr(tensor, f"__r{name}__", operator(name, True, getattr(tensor, f"__r{name}__")))

    interpreter._patch_lang_tensor = patch_lang_tensor

    # What else takes two operands (minimum, where, dot): nothing to do where their types are the same.
    semantic = interpreter.TritonSemantic
    check_types, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value

    def checked(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        if not rest and not named and _alike(lhs, rhs) and lhs.type.scalar.name in by_type:
            return lhs, rhs
        return check_types(self, lhs, rhs, *rest, **named)

    def broadcasted(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if _alike(lhs, rhs) else broadcast(self, lhs, rhs)

    def _alike(lhs: Any, rhs: Any) -> bool:
        return type(lhs) is core.tensor and type(rhs) is core.tensor and lhs.type.name == rhs.type.name

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, broadcasted


def widen_bf16(bits: Any) -> Any:
    """uint16 bits of bf16 -> the same values in fp32."""
    import numpy as np

    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: Any) -> Any:
    """Numbers -> bits of the nearest bf16, ties to even; NaN stays NaN."""
    import numpy as np

    values = np.ascontiguousarray(np.asarray(values, np.float32))
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle: Any) -> bool:
    return getattr(getattr(getattr(handle, "dtype", None), "scalar", None), "name", None) == "bf16"


def _widened(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(widen_bf16(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrowed(values: Any) -> Any:
    """A handle of bf16 from numbers; comparisons stay booleans."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(values if values.dtype == np.bool_ else round_to_bf16(values), tl.bfloat16)


def _repair_bf16_arithmetic() -> None:
    """Element-wise work, casts, FMA and dot: widen to fp32, compute, round once."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle

    def wrap(name: str, needed: Callable[..., bool], repaired: Callable[..., Any]) -> None:
        original = getattr(builder, name)

        def method(self: Any, *args: Any) -> Any:
            return repaired(original, self, *args) if needed(*args) else original(self, *args)

        setattr(builder, name, method)

    def any_bf16(*args: Any) -> bool:
        return any(map(_is_bf16, args))

    def compute(_original: Any, _self: Any, *args: Any) -> Any:
        *operands, operation = args
        return _narrowed(operation(*(_widened(operand).data for operand in operands)))

    def cast(original: Any, self: Any, source: Any, dtype: Any) -> Any:
        if _is_bf16(source):
            if dtype.scalar == tl.bfloat16:
                return original(self, source, dtype)
            return handle_of(widen_bf16(source.data).astype(interpreter._get_np_dtype(dtype)), dtype.scalar)
        return handle_of(round_to_bf16(source.data), dtype.scalar)

    def fma(_original: Any, _self: Any, x: Any, y: Any, z: Any) -> Any:
        return _narrowed(widen_bf16(x.data).astype(np.float64) * widen_bf16(y.data) + widen_bf16(z.data))

    def dot(original: Any, self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    wrap("binary_op", any_bf16, compute)
    wrap("unary_op", any_bf16, compute)
    # np.where moves bits unchanged: the original is right.
    wrap("ternary_op", lambda a, b, c, operation: operation is not np.where and any_bf16(a, b, c), compute)
    wrap("cast_impl", lambda source, dtype: any_bf16(source) or dtype.scalar == tl.bfloat16, cast)
    wrap("create_fma", any_bf16, fma)
    wrap("create_dot", any_bf16, dot)
    builder.get_bf16 = lambda self, value: _narrowed(np.array([value], np.float32))


def _repair_bf16_reductions() -> None:
    """Reductions and scans of bf16: in fp32, the result rounded once."""
    import triton.language as tl
    from triton.runtime import interpreter

    def widen(tensor: Any) -> Any:
        if tensor.dtype != tl.bfloat16:
            return tensor
        return tl.core.tensor(_widened(tensor.handle), tl.block_type(tl.float32, list(tensor.handle.data.shape)))

    def narrow(tensor: Any, dtype: Any) -> Any:
        if dtype != tl.bfloat16 or tensor.dtype != tl.float32:
            return tensor
        handle = _narrowed(tensor.handle.data)
        block = tl.block_type(tl.bfloat16, list(handle.data.shape)) if tensor.type.is_block() else tl.bfloat16
        return tl.core.tensor(handle, block)

    def wrap(cls: Any) -> None:
        original = cls.apply_impl

        def apply_impl(self: Any, value: Any) -> Any:
            if not isinstance(value, tuple | list):
                return narrow(original(self, widen(value)), value.dtype)
            result = original(self, type(value)(widen(item) for item in value))
            if not isinstance(result, tuple | list):
                return narrow(result, value[0].dtype)
            return type(result)(narrow(item, given.dtype) for item, given in zip(result, value, strict=True))

        cls.apply_impl = apply_impl

    wrap(interpreter.ReduceOps)
    wrap(interpreter.ScanOps)
