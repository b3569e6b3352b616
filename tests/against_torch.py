"""One helper for every operation: the same computation in mytorch and in torch, result and all gradients,
on a backend.
"""

import contextlib
import os

import numpy as np
import pytest
import torch

import mytorch
from mytorch import Device, Tensor, backends
from tilewise import interpreter

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process for every core: the threads of their loops would wait for each other.
    mytorch.set_num_threads(1)

BACKENDS = ("serial", "parallel", "cuda")
# By type, how far apart two right results may be, as a share of the largest element.
TOLERANCE = {"float16": 4e-3, "float32": 4e-6, "float64": 1e-12}


@contextlib.contextmanager
def on(backend):
    """Inside, computing is done by a backend; yields its device. CUDA is interpreted where there is no GPU."""
    before = backends.cpu_backend()
    if backend == "cuda":
        interpreter.use_where_no_gpu()
        yield Device.CUDA
        return
    mytorch.set_cpu_backend(backend)
    try:
        yield Device.CPU
    finally:
        mytorch.set_cpu_backend(before)


def close(found, expected, what, scale=1.0):
    """Same type, shape and, but for rounding, values: against the largest element, for small ones are often differences
    of large ones.
    """
    assert str(found.dtype) == str(expected.dtype).removeprefix("torch."), what
    assert tuple(found.shape) == tuple(expected.shape), what
    a, b = found.numpy(), expected.detach().numpy()
    if b.dtype.kind != "f":
        np.testing.assert_array_equal(a, b, err_msg=what)
        return
    largest = np.max(np.abs(b[np.isfinite(b)]), initial=1e-6)
    allowed = scale * TOLERANCE[str(b.dtype)] * largest
    np.testing.assert_allclose(
        a.astype(np.float64), b.astype(np.float64), rtol=0, atol=allowed, equal_nan=True, err_msg=what
    )


def compare(backend, ours, theirs, *arrays, dtype="float32", scale=1.0):
    """`ours` on mytorch's tensors against `theirs` on torch's, of the same NumPy arrays: floats in a type, with
    gradients; others as they are.

    The gradient that goes in is random, so that nothing cancels. In fp16 torch computes in fp32, from the same rounded
    numbers.
    """
    floats = [array.dtype.kind == "f" for array in arrays]
    arrays = [array.astype(dtype) if is_float else array for array, is_float in zip(arrays, floats, strict=True)]
    wider = "float32" if dtype == "float16" else dtype
    right = [torch.tensor(a.astype(wider) if f else a, requires_grad=f) for a, f in zip(arrays, floats, strict=True)]
    expected = theirs(*right)
    with on(backend) as device:
        mine = [Tensor.create(a, requires_grad=f, device=device) for a, f in zip(arrays, floats, strict=True)]
        found = ours(*mine)
        narrow = expected.to(getattr(torch, dtype)) if expected.is_floating_point() else expected
        close(found, narrow, "result", scale)
        if not expected.requires_grad:
            assert not found.requires_grad
            return
        incoming = np.random.default_rng(1).standard_normal(expected.shape).astype(dtype)
        found.backward(Tensor.create(incoming, device=device))
        expected.backward(torch.tensor(incoming.astype(wider)))
        for i, (x, y, is_float) in enumerate(zip(mine, right, floats, strict=True)):
            if is_float:
                assert (x.grad is None) == (y.grad is None), f"input {i}"
                if y.grad is not None:
                    close(x.grad, y.grad.to(getattr(torch, dtype)), f"gradient of input {i}", scale)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def whole(*shape, below, seed=0):
    return np.random.default_rng([seed, *shape]).integers(0, below, shape)


each_backend = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in BACKENDS]
)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
