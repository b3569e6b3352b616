"""Where an error lies, by head and tile of rows, for a report to draw."""

from dataclasses import dataclass

import torch

MOST_TILES = 64
SMALLEST_TILE = 16


@dataclass(frozen=True)
class HeatMap:
    """The largest error of each head (rows) and tile of `tile` tokens (columns), as a multiple of what is allowed; `worst` is its place."""

    tile: int
    cells: tuple[tuple[float, ...], ...]
    worst: tuple[int, int]


def heat_map(diff: torch.Tensor, allowed: float, axes: str) -> HeatMap | None:
    """`diff`'s largest elements by head and tile; None where the tensor has no tokens."""
    if "T" not in axes or diff.numel() == 0:
        return None
    kept = [axes.index(letter) for letter in "HT" if letter in axes]
    rest = [axis for axis in range(diff.ndim) if axis not in kept]
    by_token = diff.permute(*kept, *rest).unsqueeze(-1).flatten(len(kept)).amax(-1)
    by_token = by_token.reshape(-1, by_token.shape[-1])
    tile = SMALLEST_TILE
    while -(-by_token.shape[1] // tile) > MOST_TILES:
        tile *= 2
    padded = torch.nn.functional.pad(by_token, (0, -by_token.shape[1] % tile))
    cells = padded.unflatten(1, (-1, tile)).amax(-1) / (allowed or torch.finfo(torch.float32).tiny)
    at = int(cells.argmax())
    return HeatMap(tile, tuple(tuple(row) for row in cells.tolist()), (at // cells.shape[1], at % cells.shape[1]))
