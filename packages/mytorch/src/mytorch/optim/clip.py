"""Gradients that are too long, made shorter."""

import math
from collections.abc import Iterable

from mytorch import dtypes
from mytorch.autograd import no_grad
from mytorch.tensor import Tensor


@no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients by one factor, so that together they are no longer than max_norm; returns how long they were
    before.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is a number above 0, not {max_norm!r}")
    given = [x for x in parameters if x.grad is not None]
    gradients = [x.grad for x in given if x.grad is not None]
    if not gradients:
        return 0.0
    # fp16 would overflow at 256 squared.
    wide = [g.astype(dtypes.promote(g.dtype, dtypes.float32)) for g in gradients]
    squares = [(g * g).sum() for g in wide]
    norm = math.sqrt(sum(squares[1:], squares[0]).item())
    factor = max_norm / (norm + 1e-6)
    # Written so that a factor which is not a number reaches the gradients, where it shows.
    if not factor >= 1:
        for x, g in zip(given, gradients, strict=True):
            x.set_grad(g * factor)
    return norm
