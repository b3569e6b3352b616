"""What every backend of block-sparse attention takes beside its tensors, and what its forward gives."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

LAYER_NORM_EPS = 1e-6


class Options(NamedTuple):
    """What one call computes beside its tensors, as the public function names it."""

    block_counts: int
    block_size: int
    window_size: int
    scale: float
    interleave: bool


class Results(NamedTuple):
    """The output, the blocks as the public function returns them, and what the backward needs: all but the blocks in
    q's dtype and contiguous.

    k_cmp and v_cmp are the whole blocks' means: dense [B, T // block_size, H, ·], packed [N // block_size, H, ·]; in
    which rows a packed sequence's means lie is the backend's own business. o_cmp, o_slc and o_swa are the branches'
    outputs before gates and layer norm; o_swa is empty, [0], where window_size is 0.
    """

    o: "torch.Tensor"
    block_indices: "torch.Tensor"
    k_cmp: "torch.Tensor"
    v_cmp: "torch.Tensor"
    o_cmp: "torch.Tensor"
    o_slc: "torch.Tensor"
    o_swa: "torch.Tensor"
