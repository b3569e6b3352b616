"""The CUDA backend's kernels compiled for GPUs that are not here: they fit, and spill nothing to speak of."""

from pathlib import Path

import pytest
from compiling import compiled

SCRIPT = Path(__file__).with_name("compile_kernels.py")
MULTIPLYING = ("matmul", "conv2d", "conv2d_grad_input", "conv2d_grad_weight")
OTHERS = (
    *(
        "unary",
        "binary",
        "where",
        "copy",
        "fill",
        "dropout",
        "reduce",
        "softmax",
        "softmax_grad",
        "layer_norm",
        "layer_norm_grad",
    ),
    *(
        "layer_norm_columns",
        "take",
        "take_grad",
        "gather",
        "gather_grad",
        "max_pool2d",
        "max_pool2d_grad",
        "sgd",
        "adam",
    ),
)


def check(architecture: int, dtype: str, which: str, expected: tuple[str, ...]) -> None:
    kernels = compiled(SCRIPT, architecture, dtype, which)
    assert {f"mytorch_{name}_kernel" for name in expected} <= {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert not kernel["wgmma_serialised"], kernel
        multiplies = any(part in kernel["kernel"] for part in ("matmul", "conv2d"))
        assert kernel["spill_stores"] <= ((32 if architecture == 90 else 128) if multiplies else 16), kernel


@pytest.mark.slow
def test_hopper():
    check(90, "float32", "main", MULTIPLYING)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(80, marks=pytest.mark.nightly),
        pytest.param(90, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_kernel(architecture, dtype):
    check(architecture, dtype, "all", (*MULTIPLYING, *OTHERS))
