"""What an NSACache holds, as its steps read and write it."""

from typing import NamedTuple

import torch


class Stored(NamedTuple):
    """k and v `[B, room, Hk, ·]`, or with a table pools `[pages, page_size, Hk, ·]`; compressed rows `[B, C, Hk, ·]`;
    int64 lengths and int32 flags `[B]`; the table `[B, P]`; room: the most tokens of a sequence.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    lengths: torch.Tensor
    flags: torch.Tensor
    table: torch.Tensor | None
    room: int

    @property
    def page(self) -> int | None:
        """Rows of a page; None where there are none."""
        return None if self.table is None else self.k.shape[1]


# Bits of a sequence's flag: tokens came that it has no room for; its page table leads out of the pool.
FULL, ASTRAY = 1, 2
