"""Functions called as flash attention is, with the smallest kernels that show something to `tilewise inspect`."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tiny_copy_kernel(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0), mask=o < n)


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((128, 1), (128, 4), (1024, 8))], key=["n"]
)
@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % arguments["BLOCK"] == 0})
@triton.jit
def tiny_tuned_kernel(x, y, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o) if EVEN else tl.load(x + o, mask=o < n, other=0.0), mask=o < n)


@triton.jit
def tiny_spilling_kernel(x, y, BLOCK: tl.constexpr):
    # Every value is needed twice, the second time after the sum of them all: more than 24 registers hold.
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x + o).to(tl.float32)
    tl.store(y + o, (tl.exp2(b_x) / tl.sum(b_x)).to(y.dtype.element_ty))


@triton.jit
def tiny_descriptor_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK
    b_x = x.load([i, 0])
    y.store([i, 0], tl.dot(b_x, tl.trans(b_x)).to(tl.bfloat16))


def tuned(q, k, v, *, return_lse=False, **options):
    """An autotuner over heuristics."""
    o = torch.empty_like(q)
    tiny_tuned_kernel[lambda chosen: (triton.cdiv(q.numel(), chosen["BLOCK"]),)](q, o, q.numel())
    return o


def spilling(q, k, v, *, return_lse=False, **options):
    """A kernel that has too few registers."""
    o = torch.empty_like(q)
    tiny_spilling_kernel[(1,)](q, o, BLOCK=4096, num_warps=1, maxnreg=24)
    return o


def descriptors(q, k, v, *, return_lse=False, **options):
    """Tiles through tensor descriptors, and a product of matrices."""
    x, y = (
        torch.empty(256, 64, dtype=torch.bfloat16, device=q.device),
        torch.empty(256, 64, dtype=torch.bfloat16, device=q.device),
    )
    readable, writable = (TensorDescriptor.from_tensor(tensor, [64, 64]) for tensor in (x, y))
    tiny_descriptor_kernel[(4,)](readable, writable, BLOCK=64)
    return q


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _copied(x, 128)

    @staticmethod
    def backward(ctx, dy):
        return _copied(dy, 256)


def _copied(x, block):
    y = torch.empty_like(x)
    tiny_copy_kernel[(triton.cdiv(x.numel(), block),)](x, y, x.numel(), BLOCK=block)
    return y


def differentiable(q, k, v, *, return_lse=False, **options):
    """A kernel forward, another one backward."""
    return _Copy.apply(q)


def looking(q, k, v, *, return_lse=False, **options):
    """Decides by a value of its inputs, which meta tensors do not have."""
    return _copied(q, 512) if bool((q == 0).all()) else q


def refusing(q, k, v, *, return_lse=False, **options):
    """Takes tensors of one device only."""
    if not q.is_cuda:
        raise ValueError("q is not on a GPU")
    return _copied(q, 128)


def silent(q, k, v, *, return_lse=False, **options):
    """Launches nothing."""
    return q
