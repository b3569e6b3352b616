"""One call of native sparse attention: its sizes and what they imply (how many windows there are, where those of a
packed sequence begin), and the argument checks that the public functions share.
"""

import itertools
from typing import NamedTuple

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops._host.symbol import compute

# Keys of a block that a Triton program holds at once.
MAX_BLOCK = 128


class Sizes(NamedTuple):
    """The sizes of one call, as the public function names them."""

    compress_size: int
    compress_stride: int
    block_size: int
    block_count: int
    init_blocks: int
    local_blocks: int


def window_count(tokens: int, size: int, stride: int) -> int:
    """Whole windows in this many tokens; also the windows that query `tokens - 1` sees."""
    return (tokens - size) // stride + 1 if tokens >= size else 0


def mean_windows(cu: torch.Tensor | None, tokens: int, stride: int) -> torch.Tensor | None:
    """Where the means of packed sequences begin, int32 [B + 1]: with room for one window a stride, so that no length is
    needed on the host.
    """
    # Offsets that were not checked must not lead out of bounds.
    return None if cu is None else (cu // stride).clamp(0, tokens // stride).to(torch.int32)


def given_windows(cu: torch.Tensor | None, rows: int, size: int, stride: int) -> torch.Tensor | None:
    """Where the windows of packed sequences begin in `rows` rows without room between them, int32 [B + 1]."""
    return None if cu is None else compute(_given_windows, cu, rows, size, stride, shape=cu.shape, dtype=torch.int32)


def _given_windows(cu: torch.Tensor, rows: int, size: int, stride: int) -> torch.Tensor:
    counts = ((cu.diff() - size) // stride + 1).clamp(min=0)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).clamp(0, rows).to(torch.int32)


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


def check_index_values(
    block_indices: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    block_size: int,
    keys: int,
    cu_k: torch.Tensor | None = None,
) -> None:
    """Indices that are -1 or a block of their own sequence, whose offsets are right, in `keys` rows of keys; where
    values are checked.
    """
    if not checks.values_are_checked(block_indices):
        return
    blocks: int | torch.Tensor = -(-keys // block_size)
    if cu_seqlens is not None:
        lengths = (cu_seqlens if cu_k is None else cu_k).diff()
        blocks = -(-lengths // block_size).repeat_interleave(cu_seqlens.diff())[:, None, None]
    checks.check_index_values(block_indices, "block_indices", blocks)


def scale_of(q: torch.Tensor, scale: float | None) -> float:
    """The scale to use, checked where it is given."""
    if scale is None:
        return q.shape[-1] ** -0.5
    checks.check_number(scale, "scale")
    return checks.as_float(scale)


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Offsets or indices as kernels read them."""
    return None if x is None else x.contiguous()


def check_part(
    q: torch.Tensor,
    keys: int | None,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
) -> None:
    """Values of offsets; and of queries that are a part of their sequences, that they stand among their keys: of
    `keys` rows, None where those are not known.
    """
    check_offset_values(q, cu)
    if cu_k is not None and keys is not None:
        checks.check_offset_values(cu_k, "cu_k", keys)
    if first is None or not checks.values_are_checked(first):
        return
    lengths = q.shape[-3] if cu is None else cu.diff()
    most = keys if cu_k is None else cu_k.diff()
    outside = first < 0
    if most is not None:
        outside |= first + lengths > most
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(
            f"first[{at}] is {int(first[at])}: expected the position of the first query of sequence {at}, whose queries"
            " must stand among its keys"
        )


def check_packed_windows(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    size: int,
    stride: int,
) -> None:
    """Values of offsets, and as many compressed keys as they give windows."""
    check_part(q, None, cu, cu_k, first)
    check_window_values(k_cmp, cu if cu_k is None else cu_k, size, stride)


def check_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    block_size: int,
) -> None:
    """Values of offsets and of indices."""
    check_part(q, k.shape[-3], cu, cu_k, first)
    check_index_values(indices, cu, block_size, k.shape[-3], cu_k)
