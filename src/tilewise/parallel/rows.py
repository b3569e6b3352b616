"""Rows of tokens in dense `[B, T, ...]` and packed `[N, ...]` tensors alike."""

import torch

Tensor = torch.Tensor
# Which rows of an axis.
Where = slice | torch.Tensor


class Rows:
    """Takes and puts rows along the axis of tokens; of LSEs along their last."""

    def __init__(self, packed: bool) -> None:
        self.axis = 0 if packed else 1

    def count(self, x: Tensor) -> int:
        """Tokens of x."""
        return x.shape[self.axis]

    def first(self, x: Tensor) -> Tensor:
        """With the axis of tokens first."""
        return x.transpose(0, self.axis)

    def back(self, x: Tensor) -> Tensor:
        """From there to its place."""
        return x.transpose(0, self.axis)

    def take(self, x: Tensor, where: Where) -> Tensor:
        """A view of rows side by side, else a copy."""
        return _take(x, self.axis, where)

    def take_lse(self, x: Tensor, where: Where) -> Tensor:
        """The same of an LSE, contiguous."""
        return _take(x, x.dim() - 1, where).contiguous()

    def put(self, x: Tensor, where: Where, part: Tensor) -> None:
        """Write rows of x."""
        _put(x, self.axis, where, part)

    def add(self, x: Tensor, where: Where, part: Tensor) -> None:
        """Add to rows of x."""
        self.put(x, where, self.take(x, where) + part)

    def put_lse(self, x: Tensor, where: Where, part: Tensor) -> None:
        """The same of an LSE."""
        _put(x, x.dim() - 1, where, part)

    def numbers(self, where: Where, device: torch.device) -> Tensor:
        """Which rows these are."""
        return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where


def _take(x: Tensor, axis: int, where: Where) -> Tensor:
    if isinstance(where, slice):
        return x.narrow(axis, where.start, where.stop - where.start)
    return x.index_select(axis, where)


def _put(x: Tensor, axis: int, where: Where, part: Tensor) -> None:
    if isinstance(where, slice):
        x.narrow(axis, where.start, where.stop - where.start).copy_(part)
    else:
        x.index_copy_(axis, where, part)
