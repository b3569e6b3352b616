"""The work that is counted: pairs of a query and a key that a mask leaves, and operations and bytes that follow."""

from dataclasses import dataclass

import torch

from tilewise.verify.problem import Tensors


def in_window(queries: int, keys: int, left: int, right: int) -> int:
    """Of one sequence and one head, query i seeing the keys from i + off - left to i + off + right, off = keys -
    queries, -1 for no limit.
    """
    position = torch.arange(queries) + (keys - queries)
    first = (position - left).clamp(0, keys) if left >= 0 else torch.zeros_like(position)
    last = (position + right + 1).clamp(0, keys) if right >= 0 else torch.full_like(position, keys)
    return int((last - first).clamp(min=0).sum())


def window_pairs(
    q: torch.Tensor, k: torch.Tensor, lengths: tuple[int, ...], left: int, right: int, lengths_k: tuple[int, ...] = ()
) -> int:
    """Of dense `[B, T, H, D]`, or packed sequences of `lengths`."""
    heads = q.shape[-2]
    if lengths:
        return heads * sum(
            in_window(queries, keys, left, right) for queries, keys in zip(lengths, lengths_k or lengths, strict=True)
        )
    return q.shape[0] * heads * in_window(q.shape[1], k.shape[1], left, right)


def causal_pairs(q: torch.Tensor, k: torch.Tensor) -> int:
    """Of dense `[B, T, H, D]` with the causal mask."""
    return window_pairs(q, k, (), -1, 0)


def in_blocks(position: torch.Tensor, indices: torch.Tensor, block: int) -> int:
    """Keys up to each query's own, in the blocks it names: `position` broadcasts against `indices`, whose last axis
    lists blocks, -1 for none.

    A block named twice counts once.
    """
    indices = indices.sort(-1).values
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[..., 1:] = indices[..., 1:] == indices[..., :-1]
    seen = (position - indices * block + 1).clamp(0, block)
    return int(torch.where((indices >= 0) & ~again, seen, 0).sum())


def ended_windows(tokens: int, size: int, stride: int) -> int:
    """Pairs of a query and a window of keys, one each `stride`, that has ended by then; of one sequence
    and one head.
    """
    position = torch.arange(tokens)
    whole = max(0, (tokens - size) // stride + 1)
    return int(((position + 1 - size).div(stride, rounding_mode="floor") + 1).clamp(0, whole).sum())


@dataclass(frozen=True)
class Work:
    """Pairs of a query and a key, channels of both, bytes of inputs, of outputs and of the inputs that
    have gradients.
    """

    pairs: int = 0
    channels: int = 0
    values: int = 0
    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    def operations(self, mode: str, pairs: int | None) -> int:
        """A score and its use forward; backward the score again, and four products more.

        `pairs` are others than the operator's.
        """
        forward = 2 * (self.channels + self.values)
        backward = 2 * (3 * self.channels + 2 * self.values)
        return (self.pairs if pairs is None else pairs) * {
            "fwd": forward,
            "bwd": backward,
            "fwd+bwd": forward + backward,
        }[mode]

    def bytes(self, mode: str) -> int:
        """Each input read once and each output written once; backward both read, with the gradient that arrives, and
        gradients written.
        """
        forward = self.inputs + self.outputs
        backward = forward + self.outputs + self.gradients
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[mode]


def bytes_of(tensors: Tensors) -> int:
    """All elements of them."""
    return sum(x.numel() * x.element_size() for x in tensors.values())
