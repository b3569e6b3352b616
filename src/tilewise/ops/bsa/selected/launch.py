"""Block-sparse attention's branch over the chosen blocks: launches.

Plain tensors in and out; no autograd.
"""

from typing import Any, NamedTuple

import torch

from tilewise.ops._device.blocks import KeySums, ListsShape
from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import Launch, batch_size, padded_channels, power_of_2, strided, tile_widths
from tilewise.ops._host.program import emit
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.selected.kernels import bsa_selected_bwd_kernel, bsa_selected_fwd_kernel
from tilewise.ops.flash.launch import LOG2E
from tilewise.ops.nsa import configs as nsa_configs
from tilewise.ops.nsa.selected import index
from tilewise.ops.nsa.selected.index import Named, check_blocks, cut_blocks
from tilewise.ops.nsa.selected.kernels.bwd import nsa_selected_bwd_keys_kernel, nsa_selected_bwd_queries_kernel
from tilewise.ops.nsa.selected.launch import SUMMED_KEYS, SUMMED_ROWS, index_type, sum_keys, widths


class Inputs(NamedTuple):
    """One call's tensors and numbers; `shared` neighbouring heads have one choice."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    named: Named
    shared: int
    scale: float

    def config(self, kernel: configs.Kernel) -> configs.Config:
        """The tiles of one kernel."""
        width = max(tile_widths(self.q.shape[-1], self.v.shape[-1], self.q.element_size()))
        return configs.choose(kernel, width, self.q.element_size(), architecture(self.q.device), self.block_n)

    @property
    def block_n(self) -> int:
        """Keys of one tile: a block, as tiles hold it."""
        return max(16, power_of_2(self.named.block_size))


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> Inputs:
    """Inputs as the kernels take them: a long block cut into parts that fit."""
    width, size = max(tile_widths(q.shape[-1], v.shape[-1], q.element_size())), q.element_size()
    parts = nsa_configs.parts_of_block(block_size, width, size, architecture(q.device))
    if parts == 0:
        raise ValueError(
            f"block_size is {block_size}: so many keys of {width} channels and {size} bytes fit no tile, nor can they"
            " be cut into equal parts of 16 or more that do; take a multiple of 16, or backend='reference'"
        )
    check_blocks(q.shape[-3], block_size, parts, indices.shape[-1] * parts)
    if parts > 1:
        indices = cut_blocks(indices, parts)
    named = Named(indices.contiguous(), cu, block_size // parts, 0, once=True)
    return Inputs(q, k, v, named, q.shape[-2] // indices.shape[-2], scale)


def _arguments(inputs: Inputs, config: configs.Config) -> dict[str, Any]:
    q, named = inputs.q, inputs.named
    return {
        "q": strided(q),
        "k": strided(inputs.k),
        "v": strided(inputs.v),
        "cu": named.offsets,
        "n_batch": batch_size(q, named.cu),
        "n_tokens": q.shape[-3],
        "n_heads": named.heads,
        "n_slots": named.block_slots,
        "scale_log2": inputs.scale * LOG2E,
        "HEADS": inputs.shared,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def _in_lists(
    inputs: Inputs, config: configs.Config, made: index.MadeLists, chunk: index.Chunk, *rows: torch.Tensor
) -> dict[str, Any]:
    named = inputs.named
    shape = ListsShape(
        **widths(inputs)._asdict(),
        S=named.slots,
        OWN=0,
        CAUSAL=True,
        GROUP=1,
        GROUP_P=1,
        BLOCK_SIZE=named.block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=inputs.block_n,
        TOKENS=named.tile_tokens,
        INDEX=index_type(made.tokens.shape[0], 1, *rows),
        PRECISION="tf32x3" if inputs.q.dtype == torch.float32 and not config.ieee else "ieee",
    )
    return {"lists": made.lists, "first_tile": chunk.first_tile, "SHAPE": shape}


def _add_slots(
    partial: torch.Tensor, out: torch.Tensor, inputs: Inputs, lists: index.MadeLists, base: torch.Tensor | None = None
) -> Launch:
    """Each row's results of its slots, added in order, after `base` where it is given, into `out`."""
    rows = lists.tokens.shape[0] * out.shape[-2]
    arguments = {
        "partial_dq": partial,
        "ranks": lists.ranks,
        "tokens": lists.tokens,
        "base": base,
        "dq": out,
        "flag": None,
        "n_heads": inputs.named.heads,
    }
    arguments |= {"n_rows": rows, "WANTED": 0, "SLOTS": inputs.named.slots, "GROUP": inputs.shared, "D": out.shape[-1]}
    arguments |= {
        "BLOCK_D": padded_channels(out.shape[-1]),
        "BLOCK_R": SUMMED_ROWS,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    return Launch(nsa_selected_bwd_queries_kernel, -(-rows // SUMMED_ROWS), arguments)


def forward(inputs: Inputs) -> torch.Tensor:
    """Output [..., T, H, Dv] in `configs.branch_dtype`."""
    q, named = inputs.q, inputs.named
    o = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]), dtype=configs.branch_dtype(q.dtype))
    if o.numel() == 0:
        return o
    config = inputs.config("selected_fwd")
    by_token = q.shape[-2] * named.slots
    chunks = index.chunks(named, by_token * o.shape[-1] * o.element_size())
    # The first chunk is the longest: all reuse its memory.
    partial = o.new_empty((chunks[0].tiles * named.tile_tokens * by_token, o.shape[-1]))
    arguments = _arguments(inputs, config) | {"partial_o": partial}
    for chunk in chunks:
        lists = index.make_lists(named, chunk, configs.SEGMENT, None, 0)
        attend = arguments | _in_lists(inputs, config, lists, chunk, q)
        launch = Launch(bsa_selected_fwd_kernel, lists.most_segments * inputs.shared, attend)
        emit(o, launch, _add_slots(partial, o, inputs, lists))
    return o


def backward(inputs: Inputs, do: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`base` + dq in q's dtype, and fp32 sums dk and dv; all contiguous.

    Every token must have its own block among those it chose.
    """
    q, named, shared = inputs.q, inputs.named, inputs.shared
    dq, k, v = q.new_empty(q.shape), inputs.k, inputs.v
    if do.numel() == 0:
        return dq, k.new_empty(k.shape, dtype=torch.float32), v.new_empty(v.shape, dtype=torch.float32)
    config, block_n, by_token = inputs.config("selected_bwd"), inputs.block_n, q.shape[-2] * named.slots
    # What stays by entry: a row of dq, the index, and a share of the sums that further segments store separately.
    bytes_aside = (k.shape[-1] + v.shape[-1]) * 4 * block_n // configs.SEGMENT
    chunks = index.chunks(named, by_token * (dq.shape[-1] * dq.element_size() + bytes_aside + 8))
    # The first chunk's lists begin the sums: no block is without its own tokens, but in a chunk of several.
    sums = KeySums(*((x.new_zeros if len(chunks) > 1 else x.new_empty)(x.shape, dtype=torch.float32) for x in (k, v)))
    entries = chunks[0].tiles * named.tile_tokens * by_token
    aside = KeySums(*(x.new_empty((entries // configs.SEGMENT * block_n, x.shape[-1])) for x in sums))
    partial_dq = dq.new_empty((entries, dq.shape[-1]))
    arguments = _arguments(inputs, config) | {"do": strided(do), "scale": inputs.scale}
    arguments |= {"sums": sums, "aside": aside, "partial_dq": partial_dq}
    keys = sum_keys(inputs, sums, aside, shared)
    keys |= {"flag": None, "WANTED": 0, "num_warps": 4, "enable_fp_fusion": True}
    for chunk in chunks:
        lists = index.make_lists(named, chunk, configs.SEGMENT, None, 0)
        attend = arguments | _in_lists(inputs, config, lists, chunk, q, do)
        of_lists = {"ends": lists.lists.ends, "extras": lists.extras}
        emit(
            dq,
            Launch(bsa_selected_bwd_kernel, lists.most_segments * shared, attend),
            Launch(nsa_selected_bwd_keys_kernel, named.lists * shared * (block_n // SUMMED_KEYS), keys | of_lists),
            _add_slots(partial_dq, dq, inputs, lists, base),
        )
    return dq, sums.dk, sums.dv
