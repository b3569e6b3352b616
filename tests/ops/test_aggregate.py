"""Aggregates, Triton's records with methods: imported in one place, and built with all their fields."""

from pathlib import Path

import pytest
from triton.experimental.gluon import language as gl

from tilewise.ops._device.hopper import ring as module
from tilewise.ops._device.hopper.ring import aggregate

OPS = Path(module.__file__).parents[2]


def test_the_private_name_is_imported_once():
    assert [path.name for path in OPS.rglob("*.py") if "import _aggregate" in path.read_text()] == ["ring.py"]


def test_an_aggregate_takes_all_its_fields_and_no_others():
    @aggregate
    class Pair:
        first: gl.constexpr
        second: gl.constexpr

    one, two = gl.constexpr(1), gl.constexpr(2)
    pair = Pair(one, second=two)
    assert (pair.first.value, pair.second.value) == (1, 2)
    for values, named in (((one,), {}), ((one, two, two), {}), ((one,), {"first": one}), ((one,), {"third": two})):
        with pytest.raises(TypeError, match="Pair takes first, second"):
            Pair(*values, **named)
