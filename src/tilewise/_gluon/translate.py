"""A kernel as Python runs it: its own code, in which the language, jitted functions and constexprs are the simulated
ones. No source is changed, so that lines are the kernel's.
"""

import builtins
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.ampere import mbarrier as ampere_mbarrier
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tilewise._assignments import HOOK
from tilewise._gluon.ampere import ASYNC_COPY
from tilewise._gluon.ampere import BARRIERS as AMPERE_BARRIERS
from tilewise._gluon.cluster import CLUSTER, CLUSTER_BARRIERS, in_clusters
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.hopper import BARRIERS, COPIES, HOPPER
from tilewise._gluon.language import LANGUAGE
from tilewise._gluon.reductions import REDUCTIONS
from tilewise._gluon.scans import INSIDE
from tilewise._gluon.shared import Descriptor, Shared
from tilewise._gluon.spread import SpreadShared
from tilewise._gluon.values import METHODS, Pointer, Tile
from tilewise._gluon.watching import hook, with_hooks

# Triton has this module from 3.7 on.
cluster = getattr(hopper, "cluster", None)
SIMULATED: tuple[tuple[types.ModuleType, dict[str, Any]], ...] = (
    (tl.core, INSIDE),
    (gl, in_clusters(LANGUAGE, computes=True)),
    (tl, in_clusters(LANGUAGE, computes=True)),
    (async_copy, in_clusters(ASYNC_COPY)),
    (ampere_mbarrier, in_clusters(AMPERE_BARRIERS)),
    (mbarrier, in_clusters(BARRIERS) | CLUSTER_BARRIERS),
    (tma, in_clusters(COPIES | REDUCTIONS)),
    (hopper, in_clusters(HOPPER)),
    *([(cluster, CLUSTER)] if cluster else []),
)
FUNCTIONS: dict[int, Any] = {
    id(getattr(real, name)): function
    for real, functions in SIMULATED
    for name, function in functions.items()
    if hasattr(real, name)
}
# What is not known when a kernel is compiled.
RUNTIME = (Tile, Pointer, Shared, Descriptor, SpreadShared)
# What runs on the host as it stands: types, layouts and dtypes.
LANGUAGE_MODULES = ("triton.language", "triton.experimental.gluon.language")


class _OfConstants(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return not isinstance(value, RUNTIME)


class _Constant(metaclass=_OfConstants):
    """constexpr in a kernel, where constants are Python's values."""

    def __new__(cls, value: Any) -> Any:
        return value


class _Names:
    """A module whose functions are the simulated ones."""

    def __init__(self, real: types.ModuleType) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        value = translate(getattr(self._real, name), name)
        setattr(self, name, value)
        return value


class _Globals(dict[str, Any]):
    """A function's globals, translated as it uses them."""

    def __init__(self, real: dict[str, Any]) -> None:
        super().__init__(__builtins__=BUILTINS)
        self._real = real
        self._seen: dict[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        self._seen[name] = self._real[name]
        value = self[name] = translate(self._real[name], name)
        return value

    def refresh(self) -> None:
        """Forget what has been replaced since."""
        for name, value in list(self._seen.items()):
            if self._real.get(name) is not value:
                del self._seen[name], self[name]


def _range(*bounds: Any) -> Iterator[Tile]:
    """A loop's variable is a number of the kernel, even between constexprs."""
    return map(Tile, range(*map(operator.index, bounds)))


def _of_numbers(function: Callable[..., Any], of_tiles: str) -> Callable[..., Any]:
    """A built-in function that has a number of the kernel where an operand is one."""

    def call(*values: Any, **named: Any) -> Any:
        if any(isinstance(x, Tile) for x in values):
            return functools.reduce(LANGUAGE[of_tiles], values)
        return function(*values, **named)

    return call


BUILTINS = vars(builtins) | {
    "range": _range,
    "min": _of_numbers(min, "minimum"),
    "max": _of_numbers(max, "maximum"),
    HOOK: hook,
}
_globals: dict[int, _Globals] = {}
_functions: dict[Any, Callable[..., Any]] = {}
_classes: dict[Any, type] = {}
_hooked = False


def add_hooks() -> None:
    """From now on kernels run with a hook after each assignment, which costs a little where nobody watches."""
    global _hooked
    if not _hooked:
        _hooked = True
        for adopted in (_globals, _functions, _classes):
            adopted.clear()


def refresh() -> None:
    """Globals may be others than at the last launch."""
    for world in list(_globals.values()):
        world.refresh()


def translate(value: Any, name: str = "") -> Any:
    """What a kernel's code sees in place of a value."""
    if isinstance(value, tl.constexpr):
        return value.value
    value = _own(value)
    found = FUNCTIONS.get(id(value))
    if found is not None:
        return found
    if value is tl.constexpr:
        return _Constant
    if isinstance(value, JITFunction | InterpretedFunction):
        return adopt(value.fn)
    if isinstance(value, types.ModuleType):
        return _Names(value)
    if getattr(value, "__triton_aggregate__", False) and isinstance(value, type):
        return _aggregate(value)
    # Decorated by constexpr_function: runs when a kernel is compiled.
    if type(value).__name__ == "ConstexprFunction":
        return _constant(value.fn)
    if type(value) in (tuple, list):
        return type(value)(map(translate, value))
    if callable(value) and _is_of_language(value):
        return _missing(name or getattr(value, "__name__", str(value)))
    return value


def _own(value: Any) -> Any:
    """The language's own function where Triton's interpreter has put another in its place, and left it there."""
    if getattr(value, "__module__", None) != "triton.runtime.interpreter":
        return value
    return (getattr(value, "__kwdefaults__", None) or {}).get("member", value)


def _is_of_language(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return not isinstance(value, type | tl.dtype) and module.startswith(LANGUAGE_MODULES)


def _missing(name: str) -> Callable[..., Any]:
    def call(*_arguments: Any, **_named: Any) -> Any:
        raise KernelFaultError("not simulated", name, executed())

    return call


def adopt(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with its own code, in translated globals."""
    if function not in _functions:
        real: Any = function
        code = with_hooks(real) if _hooked else real.__code__
        world = _globals.setdefault(id(real.__globals__), _Globals(real.__globals__))
        cells = tuple(types.CellType(translate(cell.cell_contents)) for cell in real.__closure__ or ())
        defaults = tuple(map(translate, real.__defaults__ or ()))
        _functions[function] = adopted = types.FunctionType(code, world, real.__name__, defaults, cells)
        adopted.__kwdefaults__ = {key: translate(x) for key, x in (real.__kwdefaults__ or {}).items()}
        adopted.__module__ = real.__module__
    return _functions[function]


class _Aggregate:
    """What a kernel's aggregates are here: values that do not change once they are made."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in vars(self):
            message = f"{name} of {type(self).__name__}: an aggregate does not change; expected another one"
            raise KernelFaultError("refused", message, executed())
        object.__setattr__(self, name, value)


def _aggregate(cls: Any) -> type:
    """An aggregate as a Python class: what its constructor sets, and its methods."""
    if cls not in _classes:
        original = _original(cls)
        # From Triton 3.9 on with those that are inherited.
        fields = vars(cls).get("__annotations__") or original.__annotations__
        # Known before its methods are adopted, which may name it.
        _classes[cls] = adopted = type(cls.__name__, (_Aggregate,), {})
        members = {
            name: translate(value, name)
            for name, value in inspect.getmembers(cls)
            if isinstance(value, JITFunction | InterpretedFunction) or type(value).__name__ == "ConstexprFunction"
        }
        own = original.__dict__.get("__init__")
        if isinstance(own, JITFunction | InterpretedFunction):
            construct = adopt(own.fn)
        elif type(own).__name__ == "ConstexprFunction":
            construct = _setting_constants(own.fn)
        else:
            # Written by hand, or by Triton: it sets the fields.
            construct = _setting_fields(cls.__name__, tuple(fields), getattr(cls, "__aggregate_defaults__", {}))
        members["__init__"] = _checked(construct, fields)
        for name, member in members.items():
            setattr(adopted, name, member)
    return _classes[cls]


def _checked(construct: Callable[..., None], fields: dict[str, Any]) -> Callable[..., None]:
    """A constructor whose fields are what their annotations say. A number may be a tensor that a loop carries."""

    @functools.wraps(construct)
    def call(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        for name, expected in fields.items():
            value = getattr(self, name, None)
            if expected is tl.constexpr:
                right = not isinstance(value, RUNTIME)
            elif expected is tl.tensor:
                right = not isinstance(value, _Aggregate | Shared | tuple)
            else:
                right = not isinstance(expected, type) or not hasattr(expected, "__triton_aggregate__")
                right = right or isinstance(value, _aggregate(expected))
            if not right:
                found = "tensor" if isinstance(value, Tile | Pointer) else type(value).__name__
                message = f"{name} of {type(self).__name__} is {found}: expected {expected.__name__}"
                raise KernelFaultError("refused", message, executed())
        object.__setattr__(self, "_made", True)

    return call


def _replaced(instance: Any, **changes: Any) -> Any:
    """An aggregate with other values in some of its fields."""
    fields = {name: value for name, value in vars(instance).items() if name != "_made"}
    return type(instance)(**fields | changes)


def _original(cls: Any) -> Any:
    """The class that was decorated: Triton keeps it in what it makes of it."""
    for member in vars(cls).values():
        for cell in getattr(getattr(member, "__func__", member), "__closure__", None) or ():
            found = cell.cell_contents
            if isinstance(found, type) and found is not cls and found.__qualname__ == cls.__qualname__:
                return found
    return cls


def _constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs when a kernel is compiled, with a constexpr's value in place of one."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return translate(function(*arguments, **named))

    return call


def _setting_constants(construct: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(construct)
    def call(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        for name, value in list(vars(self).items()):
            setattr(self, name, value.value if isinstance(value, tl.constexpr) else value)

    return call


def _setting_fields(owner: str, names: tuple[str, ...], defaults: dict[str, Any]) -> Callable[..., None]:
    def construct(self: Any, *values: Any, **named: Any) -> None:
        given = dict(zip(names, values, strict=False)) | named
        twice = len(values) + len(named) > len(given)
        given = {name: translate(value) for name, value in defaults.items()} | given
        if twice or set(given) != set(names):
            message = f"{owner} takes {', '.join(names)}: got {len(values)} values and {', '.join(named) or 'no names'}"
            raise KernelFaultError("arguments", message, executed())
        for name in names:
            setattr(self, name, given[name])

    return construct


# Triton has it from 3.9 on.
if hasattr(tl.core, "aggregate_replace"):
    FUNCTIONS[id(tl.core.aggregate_replace)] = _replaced
# Functions that Triton has as methods of its tensors too.
METHODS |= {name: translate(getattr(tl, name), name) for name in vars(tl.tensor) if hasattr(tl, name)}
