"""Symbols: what a plan computes from them holds for other numbers too, or `solve` says that it does not."""

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.ops._host.program import Program
from tilewise.ops._host.symbol import Symbol, Trace, cached, plain, sample
from tilewise.ops._host.template import make

CPU = torch.device("cpu")
ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.or_, operator.and_]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
DERIVED = [max, min, lambda x, y: -(-x // y), lambda x, y: abs(x - y), lambda x, y: 1 << max(0, x - y).bit_length()]


@st.composite
def plans(draw):
    """A function of two tensors and a number that computes and decides at random, and gives all of its numbers."""
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(ARITHMETIC + DERIVED + COMPARISONS), st.integers(0, 40), st.integers(0, 40)),
            min_size=1,
            max_size=12,
        )
    )

    def plan(x, y, number):
        known = [*x.shape, *y.shape, number, 3, 1, 0, 16, *x.stride()]
        for function, one, other in steps:
            a, b = known[one % len(known)], known[other % len(known)]
            if function in COMPARISONS:
                known.append(a if function(a, b) else a + 1)
            else:
                known.append(
                    function(a, b if function not in (operator.floordiv, operator.mod, *DERIVED) else abs(b) + 1)
                )
        half = known[-1] / (abs(known[-2]) + 1) * 0.5
        return *known, half, half // 1, half * 1 + 0, half if half < math.inf else 0.0

    return plan


sizes = st.integers(0, 6) | st.sampled_from([16, 17, 32, 100])


def tensors(numbers):
    a, b, c, _ = numbers
    return torch.empty(a, b), torch.empty(c)


class _Numbers:
    """In place of a writer: a program whose values are the plan's numbers."""

    def __init__(self, plan, numbers):
        x, y = tensors(numbers)
        self.template = make(lambda *arguments: None, (), CPU, Trace())
        self.result = plan(self.template.given(x), self.template.given(y), self.template.number(numbers[-1]))
        self._values = list(dict.fromkeys(x.name for x in self.result if isinstance(x, Symbol) and not x.fixed))
        self.solve = Program._write_solve(self)

    def of(self, numbers):
        found = self.solve(tensors(numbers), [numbers[-1]])
        if found is None:
            return None
        known = dict(zip(self._values, found, strict=True))
        return tuple(sample(x) if not isinstance(x, Symbol) or x.fixed else known[x.name] for x in self.result)


@given(
    plans(),
    st.tuples(sizes, sizes, sizes, sizes),
    st.lists(st.tuples(sizes, sizes, sizes, sizes), min_size=1, max_size=6),
)
@settings(max_examples=300, deadline=None)
def test_what_solve_gives_is_what_the_plan_gives(plan, first, others):
    program = _Numbers(plan, first)
    assert program.of(first) == plan(*tensors(first), first[-1])
    for numbers in others:
        found = program.of(numbers)
        assert found is None or found == plan(*tensors(numbers), numbers[-1])


def symbol(value):
    return Trace().argument("n", value)


def lines(x):
    return x.trace.source([])[0]


def test_a_decision_binds_and_a_number_does_not():
    x = symbol(100)
    assert max(x // 64, 1) is not None
    assert len(lines(x)) == 2, "whether it is more than 1"
    for use in (plain, int, range, float, lambda x: [0] * 200 and [0] * x):
        x = symbol(100)
        use(x)
        assert any("n == 100" in line for line in lines(x)), use
    for use in (sample, repr, "{}".format, "{:,}".format, lambda x: x is None, lambda x: x == None, lambda x: x != "a"):  # noqa: E711
        x = symbol(100)
        use(x)
        assert lines(x) == [], use


def test_a_table_neither_keeps_a_symbol_nor_what_was_made_of_one():
    @cached
    def double(n, pair=(0, 0)):
        return n * 2 + pair[1]

    x = symbol(21)
    with pytest.raises(TypeError, match="cached"):
        {x: 1}  # noqa: B018
    assert double(x, (x, 1)) == 43
    assert type(double(x, (x, 1))) is int
    assert double(21) == 42
    with pytest.raises(TypeError):
        double("a", None)


def test_what_is_fixed_is_a_constant():
    x = symbol(64)
    y = x * 2
    x.fix()
    assert type(x * 2) is int
    assert type(y) is Symbol
    assert (x + 1) % 5 == 0
    assert len(lines(x)) == 1
