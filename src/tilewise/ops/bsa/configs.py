"""Tile shapes of block-sparse attention's own kernels, as data, and the pure function that picks them.

Measured on an H200 (`hopper`); the other families are chosen by compiling for them.

What every backend of block-sparse attention takes besides its tensors, and what its forward gives.
"""

from typing import Literal, NamedTuple

import torch

from tilewise.ops._host.symbol import cached
from tilewise.ops.flash.configs import family

Kernel = Literal["selected_fwd", "selected_bwd", "choose"]

# Entries of one list that one program takes: longer lists are split for balance.
SEGMENT = 1024
# Elements of one token that a warp takes in the kernels over whole tokens, and the most warps.
ELEMENTS_A_WARP, MOST_WARPS = 512, 16


class Config(NamedTuple):
    """Rows per tile, warps, stages; and blocks per tile (choose only).

    `ieee` multiplies fp32 without tensor cores, slowly: three TF32 products hold more tiles than a 99 KB card has room
    for.
    """

    block_m: int
    num_warps: int
    num_stages: int
    block_n: int = 64
    ieee: bool = False


WIDTHS = (64, 128, 256)
# (bytes an element, kernel) -> for each of WIDTHS the tiles.
TABLE: dict[tuple[int, Kernel], tuple[Config, Config, Config]] = {
    (2, "selected_fwd"): (Config(64, 4, 2), Config(64, 4, 2), Config(64, 8, 2)),
    (2, "selected_bwd"): (Config(64, 4, 2), Config(32, 4, 2), Config(32, 8, 2)),
    (2, "choose"): (Config(64, 4, 2), Config(64, 4, 2), Config(64, 8, 2)),
    (4, "selected_fwd"): (Config(32, 4, 1), Config(32, 4, 1), Config(16, 4, 1)),
    (4, "selected_bwd"): (Config(32, 4, 1), Config(32, 4, 1), Config(16, 4, 1)),
    (4, "choose"): (Config(32, 4, 1, block_n=32), Config(32, 4, 1, block_n=32), Config(16, 4, 1, block_n=32)),
}


# Elements of one tile of keys beyond which the sums of dK and dV take the registers of 8 warps.
MOST_OF_4_WARPS = 4096


@cached
def choose(kernel: Kernel, width: int, element_size: int, architecture: int, keys: int = 0) -> Config:
    """The tiles for tensors of at most `width` channels on an architecture (compute capability as one number, 90 for an
    H100).

    `keys` is how many a tile of keys holds, which follows from the block.
    """
    config = TABLE[element_size, kernel][next(i for i, limit in enumerate(WIDTHS) if width <= limit)]
    if kernel != "selected_bwd":
        return config
    if family(architecture) == "small" and width > WIDTHS[1]:
        return (
            config._replace(num_warps=8, ieee=True) if element_size == 4 else config._replace(num_warps=4, num_stages=1)
        )
    return config._replace(num_warps=8) if element_size == 2 and keys * width > MOST_OF_4_WARPS else config


# Programs of the means' dK and dV that fill a large GPU several times over; tokens per tile; query tiles that a chunk
# must have at least; most chunks.
ENOUGH_PROGRAMS, TILE, LEAST_STEPS, MOST_CHUNKS = 132 * 8, 64, 8, 16


def query_chunks(rows: int, tokens: int) -> int:
    """Into how many chunks the queries are split for the gradient of `rows` means (of all heads together), where a
    sequence has `tokens` tokens.
    """
    programs, steps = -(-rows // TILE), -(-tokens // TILE)
    return min(max(1, ENOUGH_PROGRAMS // max(1, programs)), max(1, steps // LEAST_STEPS), MOST_CHUNKS)


LAYER_NORM_EPS = 1e-6


class Options(NamedTuple):
    """What one call computes besides its tensors, as the public function names it."""

    block_counts: int
    block_size: int
    window_size: int
    scale: float
    interleave: bool


def branch_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a branch's output is kept in until layer norm, for q in that dtype: without a softmax it is a sum over all
    keys, which fp16 soon cannot hold.
    """
    return torch.float32 if dtype == torch.float16 else dtype


class Results(NamedTuple):
    """The output, the blocks as the public function returns them, and what the backward needs, contiguous: all but the
    blocks and the branches' outputs in q's dtype.

    k_cmp and v_cmp are the whole blocks' means: dense [B, T // block_size, H, ·], packed [N // block_size, H, ·]; in
    which rows a packed sequence's means lie is up to the backend. o_cmp, o_slc and o_swa are the branches'
    outputs before gates and layer norm, in `branch_dtype`; o_swa is empty, [0], where window_size is 0.
    """

    o: torch.Tensor
    block_indices: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    o_cmp: torch.Tensor
    o_slc: torch.Tensor
    o_swa: torch.Tensor
