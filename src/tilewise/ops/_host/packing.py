"""Packed batches: sequences end to end, told apart by offsets. And work cut into pieces."""

import torch


def batch_size(x: torch.Tensor, offsets: torch.Tensor | None) -> int:
    """Sequences in a dense `[B, T, H, D]` or a packed batch."""
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


def tile_slots(tokens: int, block: int, offsets: torch.Tensor | None) -> int:
    """Tiles of `block` rows that one head's grid needs: exact for dense sequences of `tokens`, an upper bound for
    packed ones.

    The bound needs no lengths, so no synchronisation: sequence b starts at slot `offsets[b] // block + b` (see
    `_device.varlen.find_tile`).
    """
    return -(-tokens // block) if offsets is None else tokens // block + offsets.shape[0] - 1


def pieces(total: int, most: int) -> list[tuple[int, int]]:
    """All of `total` in pieces of at most `most`: where each begins, and how many it has."""
    found = []
    first = 0
    # A range would fix its symbols.
    while first < total:
        found.append((first, min(most, total - first)))
        first += most
    return found
