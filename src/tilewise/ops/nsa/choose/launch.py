"""The choice of blocks: launches of scores and of the best of them, in chunks of tokens. Plain tensors in and out."""

import torch

from tilewise.ops._device.choice import Choice
from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import (
    Launch,
    batch_size,
    descriptor,
    fits_descriptor,
    padded_channels,
    pieces,
    power_of_2,
    row_strides,
    tile_slots,
    why_pointers,
)
from tilewise.ops._host.program import emit, note
from tilewise.ops.flash.configs import family
from tilewise.ops.flash.launch import LOG2E
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.choose.kernels import (
    ScoresTile,
    Windows,
    nsa_choose_best_kernel,
    nsa_choose_scores_kernel,
)
from tilewise.ops.nsa.problem import Sizes

# Scores that one program of the second kernel (one warp, so that it never waits for another) holds at a time, and
# blocks of one token at least and at most: up to the first, lengths share a kernel.
HELD = 1024
LEAST_BLOCKS, MOST_BLOCKS = 64, 2048


def choose(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    sizes: Sizes,
    scale: float,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks of every token and KV head, int32 [..., T, Hk, block_count], from the queries, the windows and the
    LSE over them.
    """
    tokens, heads_k = q.shape[-3], k_cmp.shape[-2]
    indices = q.new_empty((*q.shape[:-2], heads_k, sizes.block_count), dtype=torch.int32)
    if indices.numel() == 0:
        return indices
    config = configs.choose("scores", padded_channels(q.shape[-1]), q.element_size(), architecture(q.device))
    in_block = sizes.block_size // sizes.compress_stride
    windows_p = power_of_2(in_block)
    most_bytes = configs.WINDOW_TILE_BYTES[family(architecture(q.device))]
    if windows_p > config.block_n and windows_p * padded_channels(q.shape[-1]) * q.element_size() > most_bytes:
        raise ValueError(
            f"block_size is {sizes.block_size} and compress_stride is {sizes.compress_stride}: the {in_block} windows"
            f" of a block, of {q.shape[-1]} channels in {q.dtype}, fit no tile; take a wider stride or a smaller block,"
            " or backend='reference'"
        )
    planes = (in_block + sizes.compress_size // sizes.compress_stride - 2) // in_block + 1
    # The longest sequence of a packed batch has at most all tokens; of its keys only the windows are known here.
    most_keys = tokens if first is None else k_cmp.shape[-3] * sizes.compress_stride + sizes.compress_size
    n_blocks = -(-most_keys // sizes.block_size)
    block = min(max(power_of_2(n_blocks), LEAST_BLOCKS), MOST_BLOCKS)
    tiles = tile_slots(tokens, config.block_m, cu) * (1 if cu is not None else q.shape[0])
    most = min(tiles, max(1, configs.SCORE_BYTES // (config.block_m * heads_k * planes * n_blocks * 4)))
    buffer = q.new_empty((most * config.block_m * heads_k * planes * n_blocks,), dtype=torch.float32)
    tma = config.tma and fits_descriptor(q)
    if config.tma:
        note(q, lambda: why_pointers(q=q))
    shared = {
        "planes": buffer,
        "cu": cu,
        "first": first,
        "n_batch": batch_size(q, cu),
        "n_tokens": tokens,
        "n_heads_k": heads_k,
        "n_blocks": n_blocks,
        "enable_fp_fusion": True,
    }
    precision = "tf32x3" if q.dtype == torch.float32 else "ieee"
    block_d, block_n = padded_channels(q.shape[-1]), max(config.block_n, windows_p)
    scores = {
        "q": descriptor(q, config.block_m, block_d) if tma else q,
        "k_cmp": k_cmp,
        "lse": lse,
        "q_strides": None if tma else row_strides(q.stride()),
        "k_strides": row_strides(k_cmp.stride()),
        "windows": windows,
        "group": q.shape[-2] // heads_k,
        "n_windows": k_cmp.shape[-3],
        "scale_log2": scale * LOG2E,
        "TILE": ScoresTile(q.shape[-1], block_d, config.block_m, block_n, tma, precision),
        "WINDOWS": Windows(sizes.compress_size, sizes.compress_stride, in_block, windows_p, planes),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    rows = min(config.block_m, max(1, HELD // block))
    choice = Choice(
        BLOCK_SIZE=sizes.block_size,
        COUNT=sizes.block_count,
        COUNT_P=power_of_2(sizes.block_count),
        INIT=sizes.init_blocks,
        LOCAL=sizes.local_blocks,
        PLANES=planes,
        BLOCK=block,
        WHOLE=n_blocks <= block,
    )
    best = {"indices": indices, "CHOICE": choice, "BLOCK_M": config.block_m, "BLOCK_R": rows, "num_warps": 1}
    for first_tile, count in pieces(tiles, most):
        chunk = shared | {"first_tile": first_tile}
        emit(
            q,
            Launch(nsa_choose_scores_kernel, count * heads_k, chunk | scores | {"n_tiles": count}),
            Launch(
                nsa_choose_best_kernel,
                count * config.block_m // rows * heads_k,
                chunk | best | {"n_rows": count * config.block_m},
            ),
        )
    return indices
