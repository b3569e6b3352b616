"""What a plan runs on in place of a call's numbers and tensors: symbols and slots.

A symbol stands for a number that differs from call to call: a size, a stride, an option. A plan that runs on symbols
leaves two things: expressions, which compute a later call's numbers, and decisions, which must come out the same for
the plan's result to serve that call too. A slot has all that is known of a tensor before the call.

Imports no Triton: code that all backends share may compute with symbols.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


# What a float's text may name.
NAMES = {"inf": math.inf, "nan": math.nan}


class _Line(NamedTuple):
    """A named computation or, without a name, a decision: what must be true. And the names that it uses."""

    name: str | None
    expression: str
    needs: tuple[str, ...]


class Trace:
    """What a plan computed from a call's numbers and decided by them, in order."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._known: dict[str, Symbol] = {}
        self._decided: set[str] = set()

    def argument(self, name: str, value: float) -> Any:
        """A number of the call: its symbol, which stands in for an int or a float."""
        return Symbol(self, name, value)

    def compute(self, expression: str, value: Any, *symbols: "Symbol") -> "Symbol":
        """The symbol of an expression of symbols, which has this value now."""
        found = self._known.get(expression)
        if found is None:
            found = self._known[expression] = Symbol(self, f"t{len(self._known)}", value)
            self._lines.append(_Line(found.name, expression, tuple([x.name for x in symbols])))
        return found

    def decide(self, expression: str, outcome: bool, *symbols: "Symbol") -> bool:
        """The outcome, which is the same in every call that the plan's result serves."""
        wanted = expression if outcome else f"not {expression}"
        if wanted not in self._decided:
            self._decided.add(wanted)
            self._lines.append(_Line(None, wanted, tuple([x.name for x in symbols])))
        return outcome

    def source(self, wanted: Iterable[str]) -> tuple[list[str], set[str]]:
        """Statements that compute the wanted names, and return None where a decision comes out differently; and the
        names of arguments they need.
        """
        needed = set(wanted)
        kept: list[str] = []
        for name, expression, needs in reversed(self._lines):
            if name is None:
                kept.append(f"if not ({expression}): return None")
            elif name in needed:
                needed.discard(name)
                kept.append(f"{name} = {expression}")
            else:
                continue
            needed.update(needs)
        return kept[::-1], needed


def _operands(x: Any, y: Any) -> tuple[str, str, list["Symbol"]]:
    """Two operands as source text, and the symbols among them that are not fixed."""
    symbols = [operand for operand in (x, y) if operand.__class__ is Symbol and not operand.fixed]
    return text(x), text(y), symbols


def text(x: Any) -> str:
    """A number, or a symbol, in an expression."""
    if x.__class__ is Symbol:
        return repr(x.value) if x.fixed else x.name
    return f"({x!r})" if x < 0 else repr(x)


def _is_number(x: Any) -> bool:
    return x.__class__ in (int, float, Symbol, bool)


def _value(x: Any) -> Any:
    return x.value if x.__class__ is Symbol else x


def _computed(sign: str, function: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    if not (_is_number(x) and _is_number(y)):
        return NotImplemented
    value = function(_value(x), _value(y))
    left, right, symbols = _operands(x, y)
    if not symbols:
        return value
    if value.__class__ is int:
        # Numbers that change nothing are left out.
        if sign == "*" and "0" in (left, right):
            return 0
        if (sign, left) in (("*", "1"), ("+", "0")):
            return y
        if (sign, right) in (("*", "1"), ("//", "1"), ("+", "0"), ("-", "0")):
            return x
    return symbols[0].trace.compute(f"{left} {sign} {right}", value, *symbols)


def _arithmetic(sign: str, function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return lambda x, y: _computed(sign, function, x, y), lambda x, y: _computed(sign, function, y, x)


def _comparison(sign: str, function: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def compare(x: Any, y: Any) -> Any:
        if not _is_number(y):
            return NotImplemented
        outcome = function(x.value, _value(y))
        left, right, symbols = _operands(x, y)
        if left == right and x.value.__class__ is int:
            # The same symbol, whatever its value.
            return outcome
        if symbols:
            x.trace.decide(f"{left} {sign} {right}", outcome, *symbols)
            if outcome == (sign == "==") and sign in ("==", "!="):
                _unite(symbols)
        return outcome

    return compare


def _unite(symbols: list["Symbol"]) -> None:
    """Two that are the same in every call have one name from here on; one that is the same as a number is
    a constant.
    """
    if len(symbols) == 2:
        symbols[1].name = symbols[0].name
    else:
        symbols[0].fixed = True


class Symbol:
    """A number that differs from call to call, with its value in this one.

    Code that needs the value itself fixes it: `plain`, or any use as an int.
    """

    __slots__ = ("fixed", "name", "trace", "value")

    def __init__(self, trace: Trace, name: str, value: Any) -> None:
        self.trace, self.name, self.value = trace, name, value
        self.fixed = False

    __add__, __radd__ = _arithmetic("+", operator.add)
    __sub__, __rsub__ = _arithmetic("-", operator.sub)
    __mul__, __rmul__ = _arithmetic("*", operator.mul)
    __floordiv__, __rfloordiv__ = _arithmetic("//", operator.floordiv)
    __truediv__, __rtruediv__ = _arithmetic("/", operator.truediv)
    __mod__, __rmod__ = _arithmetic("%", operator.mod)
    __and__, __rand__ = _arithmetic("&", operator.and_)
    __or__, __ror__ = _arithmetic("|", operator.or_)
    __lshift__, __rlshift__ = _arithmetic("<<", operator.lshift)
    __lt__, __le__ = _comparison("<", operator.lt), _comparison("<=", operator.le)
    __gt__, __ge__ = _comparison(">", operator.gt), _comparison(">=", operator.ge)
    __eq__, __ne__ = _comparison("==", operator.eq), _comparison("!=", operator.ne)

    def __neg__(self) -> Any:
        return -self.value if self.fixed else self.trace.compute(f"-{self.name}", -self.value, self)

    def __pow__(self, other: Any) -> Any:
        return self.fix() ** plain(other)

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def bit_length(self) -> Any:
        """As an int's."""
        return (
            self.value.bit_length()
            if self.fixed
            else self.trace.compute(f"{self.name}.bit_length()", self.value.bit_length(), self)
        )

    def is_narrow(self) -> bool:
        """Whether it is a 32-bit number."""
        narrow = -(2**31) <= self.value < 2**31
        return narrow if self.fixed else self.trace.decide(f"-2147483648 <= {self.name} < 2147483648", narrow, self)

    def fix(self) -> Any:
        """The value, which is the same in every call that the plan's result serves."""
        if not self.fixed:
            self.trace.decide(f"{self.name} == {self.value!r}", True, self)
            self.fixed = True
        return self.value

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        return operator.index(self.fix())

    def __int__(self) -> int:
        return int(self.fix())

    def __float__(self) -> float:
        return float(self.fix())

    def __hash__(self) -> NoReturn:
        # A table would keep it beyond its trace, and what was found for this call's value.
        raise TypeError("a symbol is no key: fix it with plain(), or decorate the function with @cached")

    def __repr__(self) -> str:
        return repr(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def plain(x: Any) -> Any:
    """A number, or a tuple of them, with symbols fixed."""
    if x.__class__ is Symbol:
        return x.fix()
    if isinstance(x, tuple):
        items = [plain(y) for y in x]
        return type(x)._make(items) if hasattr(x, "_make") else tuple(items)
    return x


def sample(x: Any) -> Any:
    """The same with this call's values, which bind no other call."""
    if x.__class__ is Symbol:
        return x.value
    if isinstance(x, tuple):
        items = [sample(y) for y in x]
        return type(x)._make(items) if hasattr(x, "_make") else tuple(items)
    return x


def cached(function: Function) -> Function:
    """functools.lru_cache for what a plan calls: symbols among the arguments are fixed."""
    kept = functools.lru_cache(maxsize=1024)(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return kept(*arguments)
        except TypeError:
            return kept(*plain(arguments))

    call.cache_info = kept.cache_info  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


# Bytes that a kernel's loads may rely on in an address: what Triton specialises on.
ALIGNMENT = 16

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """As torch lays out fresh memory."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _places(index: slice, size: int) -> tuple[int, int, int]:
    """Start, length and step of a slice along an axis of this size: as `slice.indices`, which takes no
    symbols.
    """
    first, stop, step = index.start, index.stop, 1 if index.step is None else index.step
    if step < 0:
        raise ValueError("a slot's slices step forward, as a tensor's do")
    if stop is None and first is None:
        return 0, size if step == 1 else -(-size // step), step
    first = 0 if first is None else _within(first, size)
    stop = size if stop is None else _within(stop, size)
    return first, -(-(stop - first) // step) if stop > first else 0, step


def _within(limit: int, size: int) -> int:
    limit = limit if limit >= 0 else limit + size
    return 0 if limit < 0 else size if limit > size else limit


class Slot:
    """A tensor's place in a template, or a view of one: all that is known of it before the call.

    It stands in for a tensor in a plan.
    """

    __slots__ = ("_address", "_strides", "base", "device", "dtype", "offset", "shape", "template")

    def __init__(
        self,
        template: Any,
        base: int,
        shape: tuple[int, ...],
        strides: Strides,
        dtype: torch.dtype,
        address: int = 0,
        offset: int = 0,
    ) -> None:
        self.template = template
        # Which of the call's tensors it is, or is a view of, and from which byte on.
        self.base = base
        self.offset = offset
        self.shape = shape
        self._strides = strides
        self.dtype = dtype
        self.device = template.device
        self._address = address

    def stride(self, axis: int | None = None) -> Any:
        """As a tensor's."""
        return self._strides if axis is None else self._strides[axis]

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    def numel(self) -> int:
        """As a tensor's."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As a tensor's."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """The address modulo ALIGNMENT: nothing more is known."""
        return self._address

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> "Slot":
        """Fresh memory on this tensor's device."""
        return self.template.allocate("empty", tuple(shape), dtype or self.dtype)

    def new_zeros(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> "Slot":
        """The same, zeroed."""
        return self.template.allocate("zeros", tuple(shape), dtype or self.dtype)

    def contiguous(self) -> "Slot":
        """Itself where it is contiguous, else a copy."""
        if self.numel() == 0 or all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self._strides, contiguous_strides(self.shape), strict=True)
        ):
            return self
        return self.template.compute(torch.Tensor.contiguous, (self,), self.shape, self.dtype)

    def add_(self, other: "Slot") -> "Slot":
        """As a tensor's."""
        return self.template.compute(torch.Tensor.add_, (self, other), self.shape, self.dtype)

    def _view(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> "Slot":
        moved = elements * self.dtype.itemsize
        address = (self._address + moved) % ALIGNMENT
        # For a symbol, whether it is aligned is one decision; if not, its exact value is another.
        at = 0 if address == 0 else plain(address)
        return Slot(self.template, self.base, tuple(shape), tuple(strides), self.dtype, at, self.offset + moved)

    def transpose(self, axis: int, other: int) -> "Slot":
        """As a tensor's."""
        shape, strides = list(self.shape), list(self._strides)
        shape[axis], shape[other] = shape[other], shape[axis]
        strides[axis], strides[other] = strides[other], strides[axis]
        return self._view(shape, strides)

    def flatten(self, first: int, last: int) -> "Slot":
        """As a tensor's, of axes that follow one another without a gap."""
        inner = self._strides[last]
        for axis in range(last - 1, first - 1, -1):
            if self.shape[axis] != 1 and self._strides[axis] != self.shape[axis + 1] * self._strides[axis + 1]:
                raise ValueError(f"axes {first} to {last} of {self.shape}, strides {self._strides}, need a copy")
        size = math.prod(self.shape[first : last + 1])
        return self._view(
            (*self.shape[:first], size, *self.shape[last + 1 :]),
            (*self._strides[:first], inner, *self._strides[last + 1 :]),
        )

    def __getitem__(self, index: Any) -> "Slot":
        """As a tensor's, for numbers, slices, None and one Ellipsis."""
        items = list(index) if isinstance(index, tuple) else [index]
        taken = sum(item is not None and item is not Ellipsis for item in items)
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        items[at : at + 1] = [slice(None)] * (len(self.shape) - taken)
        shape: list[int] = []
        strides: list[int] = []
        elements = axis = 0
        for item in items:
            if item is None:
                # As in torch: the stride that the next axis, taken whole, would have.
                shape.append(1)
                strides.append(self.shape[axis] * self._strides[axis] if axis < len(self.shape) else 1)
                continue
            size, stride = self.shape[axis], self._strides[axis]
            axis += 1
            if isinstance(item, slice):
                first, count, step = _places(item, size)
                shape.append(count)
                strides.append(stride * step)
                elements += first * stride
            else:
                at = item if item >= 0 else item + size
                if not 0 <= at < size:
                    raise IndexError(f"index {item} is out of range of an axis of {size}")
                elements += at * stride
        return self._view(shape, strides, elements)

    def __iter__(self) -> Iterator["Slot"]:
        return (self[i] for i in range(self.shape[0]))

    def _no_values(self, *_: Any) -> Any:
        raise TypeError(
            "a slot has no values: a plan decides from shapes, strides, dtypes and options; use compute() for work on"
            " values"
        )

    # Without these a slot would count as true, and as equal to nothing but itself.
    __bool__ = __eq__ = __ne__ = _no_values
    __hash__ = object.__hash__
    item = tolist = numpy = _no_values


def compute(function: Callable[..., Any], *arguments: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The result of a torch function on tensors and numbers: a tensor of this shape and dtype, contiguous.

    In a template, a step.
    """
    slot = next((x for x in arguments if isinstance(x, Slot)), None)
    return function(*arguments) if slot is None else slot.template.compute(function, arguments, tuple(shape), dtype)
