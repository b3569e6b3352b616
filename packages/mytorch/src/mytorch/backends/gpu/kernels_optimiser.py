"""Optimisers: one pass over a parameter, its gradient and its state, all in C order."""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import number, program_number


@triton.jit
def decay(b_x, weight):
    """What weight decay adds to the gradient: without a weight nothing, whatever x is."""
    return tl.where(weight != 0, weight * b_x, tl.zeros_like(b_x))


@triton.jit
def mytorch_sgd_kernel(
    x, grad, velocity, lr: tl.float64, momentum: tl.float64, weight_decay: tl.float64, n,
    ACC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the parameter.
    # Loops over: nothing.
    # Writes: the parameter, and its velocity where there is one, in place.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + o, mask=m, other=0).to(ACC)
    update = tl.load(grad + o, mask=m, other=0).to(ACC) + decay(b_x, number(weight_decay, ACC))
    if velocity is not None:
        update += number(momentum, ACC) * tl.load(velocity + o, mask=m, other=0).to(ACC)
        tl.store(velocity + o, update.to(velocity.dtype.element_ty), mask=m)
    tl.store(x + o, (b_x - number(lr, ACC) * update).to(x.dtype.element_ty), mask=m)


@triton.jit
def mytorch_adam_kernel(
    x, grad, first, second, rate: tl.float64, correction: tl.float64, share_1: tl.float64, share_2: tl.float64,
    eps: tl.float64, shrink: tl.float64, weight_decay: tl.float64, n, ACC: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the parameter.
    # Loops over: nothing.
    # Writes: the parameter and both its moments, in place. x is first multiplied by shrink, weight_decay * x added to
    # the gradient.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + o, mask=m, other=0).to(ACC) * number(shrink, ACC)
    b_grad = tl.load(grad + o, mask=m, other=0).to(ACC) + decay(b_x, number(weight_decay, ACC))
    b_first = tl.load(first + o, mask=m, other=0).to(ACC)
    b_second = tl.load(second + o, mask=m, other=0).to(ACC)
    b_first += number(share_1, ACC) * (b_grad - b_first)
    b_second += number(share_2, ACC) * (b_grad * b_grad - b_second)
    step = number(rate, ACC) * b_first / (tl.sqrt(b_second * number(correction, ACC)) + number(eps, ACC))
    tl.store(x + o, (b_x - step).to(x.dtype.element_ty), mask=m)
    tl.store(first + o, b_first.to(first.dtype.element_ty), mask=m)
    tl.store(second + o, b_second.to(second.dtype.element_ty), mask=m)
