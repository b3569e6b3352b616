"""Where an error lies, by head and tile of rows, for a report to draw."""

import math
from dataclasses import dataclass

import torch

MOST_TILES = 64
SMALLEST_TILE = 16


@dataclass(frozen=True)
class HeatMap:
    """The largest error of each head (rows) and tile of `tile` tokens (columns), as a multiple of what is allowed;
    `worst` is its place.
    """

    tile: int
    cells: tuple[tuple[float, ...], ...]
    worst: tuple[int, int]


def heat_map(excess: torch.Tensor, axes: str) -> HeatMap | None:
    """The largest elements of `excess`, errors as multiples of what is allowed, by head and tile; None where the tensor
    has no tokens.
    """
    if "T" not in axes or excess.numel() == 0:
        return None
    kept = [axes.index(letter) for letter in "HT" if letter in axes]
    rest = [axis for axis in range(excess.ndim) if axis not in kept]
    by_token = (
        excess.nan_to_num(nan=math.inf, posinf=math.inf).permute(*kept, *rest).unsqueeze(-1).flatten(len(kept)).amax(-1)
    )
    by_token = by_token.reshape(-1, by_token.shape[-1])
    tile = SMALLEST_TILE
    while -(-by_token.shape[1] // tile) > MOST_TILES:
        tile *= 2
    padded = torch.nn.functional.pad(by_token, (0, -by_token.shape[1] % tile))
    cells = padded.unflatten(1, (-1, tile)).amax(-1)
    at = int(cells.argmax())
    return HeatMap(tile, tuple(tuple(row) for row in cells.tolist()), (at // cells.shape[1], at % cells.shape[1]))
