"""What makes Triton's interpreter faster and changes nothing else, part of its repair (`tilewise.interpreter`); and the
ways around it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

_operators_are_short = True


def speed_up() -> None:
    """Do all of it, once."""
    _speed_up_sort()
    _speed_up_helpers()
    _speed_up_types()
    _speed_up_operators()


@contextlib.contextmanager
def operators_in_full() -> Iterator[None]:
    """In launches from here on every operator goes Triton's way: for whoever watches what it calls."""
    global _operators_are_short
    before, _operators_are_short = _operators_are_short, False
    try:
        yield
    finally:
        _operators_are_short = before


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
        if name == "fp32" and (kind is float or (kind is int and -(1 << 63) <= value < 1 << 64)):
            return numbers[name](value)
        return None

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
        if not _operators_are_short:
            return
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
