"""Random shapes and random graphs, against torch."""

import numpy as np
import pytest
import torch
from against_torch import compare
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)


def numbers(shape, seed):
    return np.random.default_rng(seed).uniform(0.5, 2, shape)


@pytest.mark.parametrize("backend", ["serial", "parallel"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "pow"])
def test_broadcasting(backend, name):
    @SETTINGS
    @given(mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3, min_side=0))
    def check(shapes):
        left, right = shapes.input_shapes
        compare(
            backend,
            lambda x, y: getattr(x, name)(y),
            getattr(torch, name),
            numbers(left, 0),
            numbers(right, 1),
            dtype="float64",
        )

    check()


# Steps of a graph, each for both frameworks alike: from one or two of the values so far, all of shape [3, 4], to
# another.
STEPS = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid() * y,
    "row": lambda x, y: x + y.sum(1).reshape(3, 1) * 0.1,
    "column": lambda x, y: x * y.mean(0),
    "transposed": lambda x, y: (x.reshape(4, 3).permute(1, 0) + y) * 0.5,
    "product": lambda x, y: (x @ y.permute(1, 0) @ x) * 0.1,
    "part": lambda x, y: x + y[1:2] * y[:, 2:3],
    "softmax": lambda x, y: x.softmax(1) + y.log_softmax(1) * 0.1,
}


def build(steps):
    def run(*leaves):
        values = list(leaves)
        for name, i, j in steps:
            values.append(STEPS[name](values[i % len(values)], values[j % len(values)]).tanh())
        # Each of them takes part, the ones in the middle twice.
        return sum(value * (k + 1) for k, value in enumerate(values))

    return run


@pytest.mark.parametrize("backend", ["serial", "parallel"])
def test_random_graphs(backend):
    @SETTINGS
    @given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 20), st.integers(0, 20)), max_size=12))
    def check(steps):
        run = build(steps)
        compare(backend, run, run, *(numbers((3, 4), seed) - 1 for seed in range(3)), dtype="float64", scale=100)

    check()
