"""Gradients against differences of the function itself."""

from collections.abc import Callable, Sequence

import numpy as np

from mytorch.autograd import no_grad
from mytorch.dtypes import float64
from mytorch.tensor import Tensor


def gradcheck(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
) -> bool:
    """Compare `backward` with central differences for every element of every fp64 input that requires a gradient.

    Returns True, or raises AssertionError naming the input, the element and both values. The function must be
    deterministic; its result is weighted by fixed random numbers, so that no element's gradient can hide behind
    another's.
    """
    chosen = [(i, x) for i, x in enumerate(inputs) if x.requires_grad]
    for i, x in chosen:
        if x.dtype != float64:
            raise TypeError(
                f"gradcheck wants float64, input {i} is {x.dtype}: differences in a smaller type are mostly rounding"
            )
    if not chosen:
        raise ValueError("gradcheck wants at least one input that requires a gradient")
    fresh = [Tensor.create(x.numpy(), requires_grad=x.requires_grad, device=x.device) for x in inputs]
    out = function(*fresh)
    weights = np.random.default_rng(0).uniform(0.5, 1.5, out.shape)
    out.backward(Tensor.create(weights, dtype=out.dtype, device=out.device))
    for i, x in chosen:
        base, grad = x.numpy(), fresh[i].grad
        found = np.zeros_like(base) if grad is None else grad.numpy()
        for place in np.ndindex(base.shape):
            ends = []
            for sign in (1, -1):
                moved = base.copy()
                moved[place] += sign * eps
                with no_grad():
                    result = function(
                        *(Tensor.create(moved, device=x.device) if j == i else y.detach() for j, y in enumerate(inputs))
                    )
                ends.append((result.numpy() * weights).sum())
            expected = (ends[0] - ends[1]) / (2 * eps)
            if not abs(found[place] - expected) <= atol + rtol * abs(expected):
                raise AssertionError(
                    f"input {i} at {list(place)}: backward gives {found[place]:.6g}, the function's differences"
                    f" {expected:.6g}"
                )
    return True
