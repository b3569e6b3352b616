"""What the sizes of native sparse attention imply: how many windows and blocks there are, and where a packed sequence's
windows begin.
"""

from typing import NamedTuple

import torch

from tilewise.ops._host.slot import compute


class Sizes(NamedTuple):
    """The sizes of one call, as the public function names them."""

    compress_size: int
    compress_stride: int
    block_size: int
    block_count: int
    init_blocks: int
    local_blocks: int


def window_count(tokens: int, size: int, stride: int) -> int:
    """Whole windows in so many tokens; also the windows that query `tokens - 1` sees."""
    return (tokens - size) // stride + 1 if tokens >= size else 0


def mean_windows(cu: torch.Tensor | None, tokens: int, stride: int) -> torch.Tensor | None:
    """Where the means of packed sequences begin, int32 [B + 1]: with room for one window a stride, so that no length is
    needed on the host.
    """
    # Offsets that were not checked must not lead out of bounds.
    return None if cu is None else (cu // stride).clamp(0, tokens // stride).to(torch.int32)


def given_windows(cu: torch.Tensor | None, rows: int, size: int, stride: int) -> torch.Tensor | None:
    """Where the windows of packed sequences begin in `rows` rows without room between them, int32 [B + 1]."""
    return None if cu is None else compute(_given_windows, cu, rows, size, stride, shape=cu.shape, dtype=torch.int32)


def _given_windows(cu: torch.Tensor, rows: int, size: int, stride: int) -> torch.Tensor:
    counts = ((cu.diff() - size) // stride + 1).clamp(min=0)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).clamp(0, rows).to(torch.int32)
