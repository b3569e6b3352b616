"""Block-sparse attention's choice of blocks: its launch. Plain tensors in and out."""

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import Launch, batch_size, padded_channels, power_of_2, row_strides, tile_slots
from tilewise.ops._host.program import emit
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.choose.kernels import ChoiceShape, bsa_choose_kernel
from tilewise.ops.flash.launch import LOG2E


def choose(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    count: int,
    block_size: int,
    shared: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` blocks of every token, int32 [..., T, H / shared, count], ascending, -1 at the end: the first of
    `shared` heads chooses for all.

    And the same as users see it, [..., H, T, count].
    """
    tokens, heads = q.shape[-3], q.shape[-2] // shared
    indices = q.new_empty((*q.shape[:-2], heads, count), dtype=torch.int32)
    public = q.new_empty((*q.shape[:-3], q.shape[-2], tokens, count), dtype=torch.int32)
    if indices.numel() == 0:
        return indices, public
    config = configs.choose("choose", padded_channels(q.shape[-1]), q.element_size(), architecture(q.device))
    tiles = tile_slots(tokens, config.block_m, cu) * (1 if cu is not None else q.shape[0])
    arguments = {
        "q": q,
        "k_cmp": k_cmp,
        "indices": indices,
        "public": public,
        "q_strides": row_strides(q.stride()),
        "k_strides": row_strides(k_cmp.stride()),
        "cu": cu,
        "windows": windows,
        "n_batch": batch_size(q, cu),
        "n_tokens": tokens,
        "n_choosing": heads,
        "n_windows": k_cmp.shape[-3],
        "n_tiles": tiles,
        "scale_log2": scale * LOG2E,
        "SHAPE": ChoiceShape(
            HEADS=shared,
            D=q.shape[-1],
            BLOCK_D=padded_channels(q.shape[-1]),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_SIZE=block_size,
            COUNT=count,
            COUNT_P=max(2, power_of_2(count)),
            PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
        ),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    emit(q, Launch(bsa_choose_kernel, tiles * heads, arguments))
    return indices, public
