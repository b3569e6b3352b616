"""Compiles the kernels of mytorch's CUDA backend without a GPU and prints what they use as JSON.

`compile_kernels.py ARCHITECTURE DTYPE SET`: SET is `main` (matrix products and convolution), `all`, or
`each`, every kernel once.
"""

import sys

import numpy as np
import torch
from compile_launches import print_facts

from mytorch.backends.base import BINARY, COMPARISONS, UNARY
from mytorch.backends.cuda import CudaBackend
from tilewise.ops._host.launching import capture

BACKEND = CudaBackend(torch.device("meta"))


def array(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def matrices(dtype: torch.dtype) -> None:
    large, small = array(2048, 2048, dtype=dtype), array(50, 70, dtype=dtype)
    BACKEND.linear(large, large, large[0])
    # Rows and columns exchanged, as a backward has them; odd sizes; a batch of several axes; a sum that is divided.
    BACKEND.matmul(large, large.T)
    BACKEND.matmul(small.T, small)
    BACKEND.matmul(array(3, 5, 50, 70, dtype=dtype).transpose(0, 1), array(3, 70, 33, dtype=dtype))
    BACKEND.matmul(array(64, 8192, dtype=dtype), array(8192, 64, dtype=dtype))


def images(dtype: torch.dtype, whole: bool) -> None:
    for channels, seen, wanted in ((1, 28, 6), (16, 24, 32), (64, 32, 128))[0 if whole else 2 :]:
        x, weight = array(64, channels, seen, seen, dtype=dtype), array(wanted, channels, 5, 5, dtype=dtype)
        for where in (((1, 1), (0, 0)), ((2, 2), (1, 1)))[0 if whole else 1 :]:
            y = BACKEND.conv2d(x, weight, weight[:, 0, 0, 0], *where)
            BACKEND.conv2d_grad_input(y, weight, tuple(x.shape), *where)
            BACKEND.conv2d_grad_weight(y, x, tuple(weight.shape), *where)
        y, place = BACKEND.max_pool2d(x, (2, 2), (2, 2))
        BACKEND.max_pool2d_grad(y, place, tuple(x.shape), (2, 2), (2, 2))


def rows(dtype: torch.dtype) -> None:
    for shape in ((64, 10), (512, 768), (8, 50304)):
        x, weight = array(*shape, dtype=dtype), array(shape[-1], dtype=dtype)
        BACKEND.softmax_grad(x, BACKEND.softmax(x))
        BACKEND.log_softmax_grad(x, BACKEND.log_softmax(x))
        y, mean, rstd = BACKEND.layer_norm(x, weight, weight, 1e-5)
        BACKEND.layer_norm_grad(y, x, weight, mean, rstd)
    for axes in ((0,), (1,), (0, 1)):
        BACKEND.sum(array(512, 770, dtype=dtype), axes, False)
        BACKEND.max(array(512, 770, dtype=dtype), axes, True)
    BACKEND.sum(array(64, 6, 24, 24, dtype=dtype), (0, 2, 3), False)
    # Means: in one pass, in two, and a gradient's.
    for shape, axes in (((64, 10), (1,)), ((300, 770), (0, 1)), ((64, 10), ())):
        BACKEND.sum(array(*shape, dtype=dtype), axes, False, 10)


def elements(dtype: torch.dtype) -> None:
    x, y = array(64, 100, dtype=dtype), array(100, dtype=dtype)
    for name in UNARY:
        BACKEND.unary(name, x)
    for name in BINARY:
        BACKEND.binary(name, x, x)
    BACKEND.binary("add", x, y)
    BACKEND.binary("add", x, y[:1])
    BACKEND.binary("mul", array(2, 3, 4, 5, 6, dtype=dtype).permute(4, 2, 0, 1, 3), array(3, 1, dtype=dtype))
    BACKEND.where(BACKEND.binary("lt", x, y), x, y)
    BACKEND.full((5,), 0.1, BACKEND.dtype(x))
    BACKEND.dropout_mask((64, 100), 0.1, 3, BACKEND.dtype(x))
    for other in ("float16", "float32", "float64", "int64", "bool"):
        BACKEND.cast(x.T, np.dtype(other))


def numbers(dtype: torch.dtype) -> None:
    index = array(64, 128, dtype=torch.int64)
    table = array(65, 256, dtype=dtype)
    BACKEND.take_grad(BACKEND.take(table, index), index, 65)
    BACKEND.gather_grad(BACKEND.gather(table, 1, index), 1, index, (65, 256))
    x = array(100, 64, dtype=dtype)
    BACKEND.sgd_(x, x, None, 0.1, 0.0, 0.0)
    BACKEND.sgd_(x, x, x, 0.1, 0.9, 0.0)
    BACKEND.adam_(x, x, x, x, 1, 0.1, (0.9, 0.99), 1e-8, 0.0, True)


def integers() -> None:
    x = array(64, 100, dtype=torch.int64)
    for name in ("add", "sub", "mul", "pow", *COMPARISONS):
        # Not through `binary`, which looks at exponents.
        BACKEND._binary(name, x, x)
    BACKEND.unary("neg", x)
    BACKEND.matmul(x, x.T)
    for found in (x, array(64, 100, dtype=torch.bool)):
        BACKEND.max(found, (0, 1), False)
        BACKEND.cast(found, np.dtype("float32"))
    BACKEND.sum(x, (0,), False)
    BACKEND.binary("add", found, found)


def main(architecture: int, dtype: torch.dtype, which: str) -> None:
    whole = which != "main"
    with capture(architecture) as launches:
        matrices(dtype)
        images(dtype, whole)
        if whole:
            rows(dtype)
            elements(dtype)
            numbers(dtype)
            integers()
    first = {launch.kernel.__name__: launch for launch in reversed(launches)}
    print_facts(first.values() if which == "each" else launches, architecture)


main(int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3])
