"""Prints what every operator makes of operands of every type and shape, once as Triton interprets it and, with `1`,
repaired; run by test_interpreter.py, which compares the two.
"""

import operator
import sys

import numpy as np
import torch
import triton
import triton.language as tl

NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lt", "le", "gt", "ge", "eq", "ne")
NUMBERS = torch.randn(8, generator=torch.Generator().manual_seed(0))


def show(names, values):
    # Outside of the kernel: Triton would turn what is assigned there into tensors.
    for left, a in zip(names, values, strict=True):
        for right, b in zip(names, values, strict=True):
            if isinstance(a, tl.tensor) or isinstance(b, tl.tensor):
                # The language's functions are looked up here: they are others while a kernel runs.
                for apply in (*(getattr(operator, name) for name in NAMES), tl.maximum, tl.minimum):
                    print(left, getattr(apply, "__name__", "function"), right, outcome(apply, a, b))


def outcome(apply, a, b):
    try:
        result = apply(a, b)
    except Exception as error:
        return type(error).__name__
    data = result.handle.data
    # Booleans are kept as NumPy's or as numbers.
    values = data.astype(np.int64) if data.dtype == np.bool_ else data
    # The address differs from run to run.
    values = (values - np.uint64(NUMBERS.data_ptr())).view(np.int64) if result.type.scalar.is_ptr() else values
    return result.type, data.shape, values.tolist()


@triton.jit
def operators_kernel(x, n, large, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    numbers = tl.load(x + o)
    show(
        ("int32 scalar", "int64 scalar", "fp32 scalar", "pointer", "pointers", "int32", "int32 row", "int32 column",
         "int64", "fp32", "fp32 row", "fp16", "bool", "short", "constant", "3", "-2", "2**40", "2**70", "1.5", "True"),
        (n, large, tl.load(x), x, x + o, o + 1, o[None, :] + 1, o[:, None] + 1,
         o.to(tl.int64) + large, numbers, numbers[None, :], numbers.to(tl.float16), numbers > 0, tl.arange(0, 2) + 1,
         SIZE, 3, -2, 2**40, 2**70, 1.5, True),
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "1":
        from tilewise import interpreter

        interpreter.repair()
    np.seterr(all="ignore")
    operators_kernel[(1,)](NUMBERS, 5, 2**33, SIZE=8)
