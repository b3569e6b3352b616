"""Kernels as Triton sees them before and after it compiles them, without a GPU: what launches one is written down."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

MEMORY = torch.empty(256, dtype=torch.float32)
PLAIN = {"x": MEMORY, "size": 5, "stride": 48, "strides": (32, 17), "scale": 0.5, "SIZE": 64, "num_warps": 4}
MADE_WITH = {"swizzle": 3, "elem_size": 4, "elem_type": 8, "block_size": [8, 16], "fp4_padded": False}


def rows(x, size, stride, strides, scale, SIZE: tl.constexpr, WIDTH: tl.constexpr = 4):
    pass


class Kernel:
    """A kernel as Triton sees it before it is compiled; what launches it is written down."""

    def __init__(self):
        jitted = JITFunction(rows, do_not_specialize=["size"])
        self.fn, self.params = jitted.fn, jitted.params
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(jitted.signature, jitted.params, backend)
        self.direct, self.by_triton = [], []
        self.descriptors = None

    def warmup(self, grid, **_arguments):
        return Compiled(self, self.descriptors)


class Driver:
    """The driver's launcher is no Python function."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *arguments):
        self.calls.append(arguments)


class Compiled:
    """What Triton makes of a kernel, with its own launcher around a driver that only writes down."""

    def __init__(self, kernel, descriptors=None):
        self.function, self.packed_metadata = 1234, (4, 1)
        self.metadata = SimpleNamespace(tensordesc_meta=descriptors)
        self.kernel = kernel
        self.run = launcher = object.__new__(nvidia.CudaLauncher)
        # Where there are descriptors, x is one.
        signature = {"x": "tensordesc<fp32[8, 16]>"} if descriptors else {}
        launcher.launch = nvidia.wrap_handle_tensordesc(Driver(kernel.direct), signature, descriptors)
        launcher.num_ctas = 1
        launcher.arg_annotations, launcher.kernel_signature = ("annotations",), b"signature"
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.launch_cooperative_grid, launcher.launch_pdl = False, True

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.by_triton.append((grid, arguments))


needs_one_launcher = pytest.mark.skipif(
    "arg_annotations" not in nvidia.CudaLauncher.__init__.__code__.co_names,
    reason="Triton 3.6 makes a launcher for each signature",
)
