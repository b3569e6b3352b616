"""Numbers that differ from call to call: sizes, strides, options that are numbers. What a plan computes from them is
written down as code.

A plan that is given symbols in place of numbers leaves two things: expressions, by which a later call's numbers are
computed, and decisions, which must come out the same for what the plan left to serve that call too.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


# What a float's text may name.
NAMES = {"inf": math.inf, "nan": math.nan}


class _Line(NamedTuple):
    """What is computed under a name, or, without one, a decision: what must be true. And of which names it is made."""

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
        """Statements that compute the wanted names, and return None where a decision comes out otherwise; and the names
        of arguments they need.
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
            # The same symbol, whatever it is.
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

    Whoever wants the value itself fixes it: `plain`, or any use as an int.
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
