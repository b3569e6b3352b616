"""A kernel that does next to nothing: compiled first, it takes what a process pays once for all of its kernels.

Triton hashes its own 400 MB library and imports its code generator inside the first compilation.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def first_kernel(pointer):  # noqa: D103
    tl.store(pointer, 1)


def compile_first() -> None:
    """On the current GPU."""
    first_kernel[(1,)](torch.empty(1, device="cuda", dtype=torch.int32))
    torch.cuda.synchronize()
