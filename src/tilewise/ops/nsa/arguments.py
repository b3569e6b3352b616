"""Argument checks that native sparse attention's functions share."""

import itertools

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops.nsa.sizes import Sizes, window_count

# Keys of a block that a Triton program holds at once.
MAX_BLOCK = 128


def check_compression(compress_size: int, compress_stride: int) -> None:
    """Windows that are a whole number of strides."""
    checks.check_whole(compress_size, "compress_size", 1)
    checks.check_whole(compress_stride, "compress_stride", 1)
    _check_multiple(compress_size, "compress_size", compress_stride)


def _check_multiple(value: int, name: str, stride: int) -> None:
    if value % stride != 0:
        raise ValueError(
            f"{name} is {value} and compress_stride is {stride}: {name} must be a multiple of compress_stride"
        )


def check_sizes(sizes: Sizes) -> None:
    """Everything about windows, blocks and the choice among them."""
    check_compression(sizes.compress_size, sizes.compress_stride)
    checks.check_whole(sizes.block_size, "block_size", 1)
    _check_multiple(sizes.block_size, "block_size", sizes.compress_stride)
    checks.check_whole(sizes.block_count, "block_count", 1)
    checks.check_whole(sizes.init_blocks, "init_blocks", 0)
    checks.check_whole(sizes.local_blocks, "local_blocks", 0)
    if sizes.init_blocks + sizes.local_blocks > sizes.block_count:
        raise ValueError(
            f"init_blocks is {sizes.init_blocks}, local_blocks is {sizes.local_blocks} and block_count is"
            f" {sizes.block_count}: the blocks that are always chosen, init_blocks + local_blocks, must not be more"
            " than block_count"
        )


def check_tensors(
    tensors: dict[str, torch.Tensor],
    cu_seqlens: torch.Tensor | None,
    backend: str | None,
    block_size: int | None = None,
) -> str:
    """q, keys and perhaps values, in this order, with their offsets; returns the backend to use, which must take blocks
    of block_size.
    """
    packed = cu_seqlens is not None
    checks.check_fit(tensors, checks.check_attention_tensors(tensors, packed, offsets="cu_seqlens"), packed)
    q = tensors["q"]
    if cu_seqlens is not None:
        checks.check_offsets_tensor(cu_seqlens, "cu_seqlens", q.device, q.shape[0])
    return check_backend(backend, q, "q", block_size)


def check_backend(backend: str | None, q: torch.Tensor, name: str, block_size: int | None) -> str:
    """The backend to use: one that takes q's dtype and blocks of block_size."""
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, name, backend)
    if backend == "triton" and block_size is not None and block_size > MAX_BLOCK:
        raise ValueError(
            f"block_size is {block_size}: backend 'triton' takes blocks of at most {MAX_BLOCK}; backend='reference'"
            " takes any"
        )
    return backend


def check_lengths(tensors: dict[str, torch.Tensor], axis: int = -3) -> None:
    """Self-attention: as many keys as queries."""
    (name_q, q), (name_k, k), *_ = tensors.items()
    if k.shape[axis] != q.shape[axis]:
        raise ValueError(
            f"{name_k} has {k.shape[axis]} tokens and {name_q} has {q.shape[axis]}: they must be equal (got shapes"
            f" {checks.shapes_of(tensors)})"
        )


def check_windows(
    q: torch.Tensor, k_cmp: torch.Tensor, cu_seqlens: torch.Tensor | None, compress_size: int, compress_stride: int
) -> None:
    """As many compressed keys as q's tokens have windows; of packed ones, which `check_window_values` counts, not too
    many.
    """
    tokens, rows = q.shape[-3], k_cmp.shape[-3]
    if cu_seqlens is None:
        count = window_count(tokens, compress_size, compress_stride)
        if rows != count:
            raise ValueError(
                f"k_cmp has {rows} windows: expected {count}, (T - compress_size) // compress_stride + 1 of {tokens}"
                " tokens"
            )
    elif rows > tokens // compress_stride:
        raise ValueError(
            f"k_cmp has {rows} windows: {tokens} tokens have at most {tokens // compress_stride}, one each"
            " compress_stride; expected (T - compress_size) // compress_stride + 1 for each sequence"
        )


def check_offset_values(q: torch.Tensor, cu_seqlens: torch.Tensor | None) -> None:
    """Offsets that hold q's tokens, where values are checked."""
    if cu_seqlens is not None:
        checks.check_offset_values(cu_seqlens, "cu_seqlens", q.shape[0])


def check_window_values(
    k_cmp: torch.Tensor, cu_seqlens: torch.Tensor | None, compress_size: int, compress_stride: int
) -> None:
    """As many compressed keys as the packed sequences, whose offsets are right, have windows; where values
    are checked.
    """
    if cu_seqlens is None or not checks.values_are_checked(cu_seqlens):
        return
    rows = k_cmp.shape[0]
    expected = sum(
        window_count(end - start, compress_size, compress_stride)
        for start, end in itertools.pairwise(cu_seqlens.tolist())
    )
    if rows != expected:
        raise ValueError(
            f"k_cmp has {rows} windows: expected {expected}, the sum of (T - compress_size) // compress_stride + 1 over"
            " cu_seqlens' sequences"
        )


def check_index_values(block_indices: torch.Tensor, cu_seqlens: torch.Tensor | None, block_size: int) -> None:
    """Indices that are -1 or a block of their own sequence, whose offsets are right; where values are checked."""
    if not checks.values_are_checked(block_indices):
        return
    blocks: int | torch.Tensor = -(-block_indices.shape[-3] // block_size)
    if cu_seqlens is not None:
        lengths = cu_seqlens.diff()
        blocks = -(-lengths // block_size).repeat_interleave(lengths)[:, None, None]
    checks.check_index_values(block_indices, "block_indices", blocks)
