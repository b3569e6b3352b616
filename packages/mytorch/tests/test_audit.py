"""mytorch's Triton kernels, too, fit 32 bits at sizes that no machine holds."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mytorch.backends.cuda import CudaBackend
from tilewise.inspect.audit import faults, limits
from tilewise.ops._host.launching import capture

pytestmark = pytest.mark.skipif(
    "__import__('torch').cuda.is_available()", reason="kernels of this process are compiled, not interpreted"
)

BACKEND = CudaBackend(torch.device("meta"))
ROWS, COLUMNS, IMAGES = 10_000_019, 512, 100_003


def array(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def layer_norm(x):
    weight = array(COLUMNS)
    y, mean, rstd = BACKEND.layer_norm(x, weight, weight, 1e-5)
    BACKEND.layer_norm_grad(y, x, weight, mean, rstd)


def take(_):
    index = array(ROWS, dtype=torch.int64)
    BACKEND.take_grad(BACKEND.take(array(65, COLUMNS), index), index, 65)


def convolution(_):
    x, weight, where = array(IMAGES, 64, 32, 32), array(128, 64, 5, 5), ((2, 2), (1, 1))
    y = BACKEND.conv2d(x, weight, array(128), *where)
    BACKEND.conv2d_grad_input(y, weight, tuple(x.shape), *where)
    BACKEND.conv2d_grad_weight(y, x, tuple(weight.shape), *where)


def pooling(_):
    x = array(IMAGES, 64, 32, 32)
    y, place = BACKEND.max_pool2d(x, (2, 2), (2, 2))
    BACKEND.max_pool2d_grad(y, place, tuple(x.shape), (2, 2), (2, 2))


CALLS = {
    "add": lambda x: BACKEND.binary("add", x, x),
    "add-broadcast": lambda x: BACKEND.binary("add", x, array(COLUMNS)),
    "add-transposed": lambda x: BACKEND.binary("add", x, array(COLUMNS, ROWS).T),
    "exp": lambda x: BACKEND.unary("exp", x),
    "cast": lambda x: BACKEND.cast(x.T, np.dtype("float16")),
    "full": lambda x: BACKEND.full(tuple(x.shape), 0.1, np.dtype("float32")),
    "linear": lambda x: BACKEND.linear(x, array(COLUMNS, COLUMNS), array(COLUMNS)),
    "matmul-long": lambda x: BACKEND.matmul(x.T, x),
    "softmax": lambda x: BACKEND.softmax_grad(x, BACKEND.softmax(x)),
    "log-softmax": lambda x: BACKEND.log_softmax_grad(x, BACKEND.log_softmax(x)),
    "layer-norm": layer_norm,
    "sum": lambda x: BACKEND.sum(x, (0, 1), False),
    "sum-rows": lambda x: BACKEND.sum(x, (0,), False),
    "max": lambda x: BACKEND.max(x, (1,), False),
    "take": take,
    "sgd": lambda x: BACKEND.sgd_(x, x, x, 0.1, 0.9, 0.0),
    "adam": lambda x: BACKEND.adam_(x, x, x, x, 1, 0.1, (0.9, 0.99), 1e-8, 0.0, True),
    "convolution": convolution,
    "pooling": pooling,
}


@pytest.mark.parametrize("name", CALLS)
def test_mytorchs_kernels(name):
    with capture(90) as launches:
        CALLS[name](array(ROWS, COLUMNS))
    assert launches
    for launch in launches:
        assert limits(launch) + faults(launch, {}) == [], launch.kernel.__name__


def test_a_narrow_offset_is_caught():
    with capture(90) as launches:
        CALLS["exp"](array(ROWS, COLUMNS))
    (launch,) = launches
    (fault, *_) = faults(replace(launch, arguments=launch.arguments | {"WIDE": False}), {})
    assert "int32 overflows" in fault
