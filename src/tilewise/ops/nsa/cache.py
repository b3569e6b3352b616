"""What decoding with native sparse attention keeps of each sequence: keys, values, and its windows compressed."""

import warnings
from collections.abc import Sequence

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops._host.register import uncompiled
from tilewise.ops.nsa.cached import reference, steps
from tilewise.ops.nsa.cached.checks import check_new, check_pools
from tilewise.ops.nsa.cached.steps import Compress
from tilewise.ops.nsa.cached.stored import ASTRAY, FULL, Stored
from tilewise.ops.nsa.problem import Sizes, check_sizes, window_count


class NSACache:
    """Keys, values and compressed windows of up to `max_len` tokens for each sequence of a batch, kept up to date as
    tokens arrive.

    Args:
        batch, max_len: sequences, and the most tokens that each may have.
        kv_heads, D, Dv: as in k `[B, T, kv_heads, D]` and v `[B, T, kv_heads, Dv]`.
        compress_size, compress_stride, block_size, block_count, window_size, init_blocks, local_blocks: as in
            native_sparse_attention.
        compress: a learned compression, `compress(k_windows, v_windows) -> (k_cmp, v_cmp)`, from
            `[B', C', compress_size, kv_heads, D]` and `[.., Dv]` to `[B', C', kv_heads, D]` and `[.., Dv]`, every
            window for itself; B' and C' are whatever there is to compress. On a GPU it is given windows of zeros too,
            whose result is dropped. By default windows are compressed to their means.
        dtype, device: of everything stored.
        page_table: int32 or int64 `[B, P]` on the cache's device: token j of sequence b is row `j % page_size` of page
            `page_table[b, j // page_size]`. Entries behind the used ones are not read; a page that is written belongs
            to one sequence. Change it in place.
        k_pages, v_pages: with page_table, the pools `[pages, page_size, kv_heads, D]` and `[.., Dv]` that k and v are
            kept in, page_size a multiple of 16. Compressed rows stay dense.

    `lengths` is int64 `[B]`, on the device, and updated in place; `k` and `v` are `[B, max_len, kv_heads, ·]` and
    `k_cmp` and `v_cmp` `[B, most windows, kv_heads, ·]`, of which a sequence's own tokens and whole windows are filled.

    A token that comes to a full sequence is a ValueError where values are checked: on the CPU always, on a GPU with
    TILEWISE_CHECK=1. Elsewhere it is not stored, and `check` raises from then on.
    """

    def __init__(
        self,
        batch: int,
        max_len: int,
        kv_heads: int,
        D: int,
        Dv: int,
        *,
        compress_size: int = 32,
        compress_stride: int = 16,
        block_size: int = 64,
        block_count: int = 16,
        window_size: int = 512,
        init_blocks: int = 1,
        local_blocks: int = 2,
        compress: Compress | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        page_table: torch.Tensor | None = None,
        k_pages: torch.Tensor | None = None,
        v_pages: torch.Tensor | None = None,
    ) -> None:
        for name, value in {"batch": batch, "max_len": max_len, "kv_heads": kv_heads}.items():
            checks.check_whole(value, name, 1)
        for name, value in {"D": D, "Dv": Dv}.items():
            checks.check_whole(value, name, 1)
            if value > checks.MAX_CHANNELS:
                raise ValueError(f"{name} is {value}: expected 1 to {checks.MAX_CHANNELS} channels")
        if dtype not in checks.DTYPES:
            raise TypeError(
                f"dtype is {dtype}: expected float16, bfloat16 or float32 (float64 too where backend='reference')"
            )
        self.sizes = Sizes(compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks)
        check_sizes(self.sizes)
        checks.check_whole(window_size, "window_size", 1)
        self.batch, self.max_len, self.kv_heads, self.D, self.Dv = batch, max_len, kv_heads, D, Dv
        self.compress_size, self.compress_stride = compress_size, compress_stride
        self.block_size, self.block_count, self.window_size = block_size, block_count, window_size
        self.init_blocks, self.local_blocks = init_blocks, local_blocks
        self.dtype = dtype
        self.compress = compress
        most = self.windows(max_len)
        # A tensor made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            # By head, so that the keys of a block lie together.
            k_cmp, v_cmp = (
                torch.empty(batch, kv_heads, most, d, dtype=dtype, device=device).transpose(1, 2) for d in (D, Dv)
            )
            lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            flags = torch.zeros(batch, dtype=torch.int32, device=device)
            if page_table is None and k_pages is None and v_pages is None:
                k, v = (
                    torch.empty(batch, kv_heads, max_len, d, dtype=dtype, device=device).transpose(1, 2)
                    for d in (D, Dv)
                )
            else:
                k, v = check_pools(page_table, k_pages, v_pages, lengths, (kv_heads, D, Dv), dtype, max_len)
        self.device = lengths.device
        self.stored = Stored(k, v, k_cmp, v_cmp, lengths, flags, page_table, max_len)

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence, int64 `[B]`: the same tensor always. Set back, the last tokens are forgotten."""
        return self.stored.lengths

    @lengths.setter
    def lengths(self, lengths: torch.Tensor) -> None:
        # `cache.lengths -= 2` comes here too, with the tensor itself.
        if lengths is not self.stored.lengths:
            self.stored.lengths.copy_(lengths)

    @property
    def k(self) -> torch.Tensor:
        """Keys `[B, max_len, kv_heads, D]`; of pages a copy."""
        return self._rows(self.stored.k)

    @property
    def v(self) -> torch.Tensor:
        """Values `[B, max_len, kv_heads, Dv]`; of pages a copy."""
        return self._rows(self.stored.v)

    @property
    def k_cmp(self) -> torch.Tensor:
        """Compressed keys `[B, most windows, kv_heads, D]`."""
        return self.stored.k_cmp

    @property
    def v_cmp(self) -> torch.Tensor:
        """Compressed values `[B, most windows, kv_heads, Dv]`."""
        return self.stored.v_cmp

    @property
    def longest(self) -> int:
        """The most tokens that a sequence has; the host waits for the device."""
        return int(self.lengths.max())

    def windows(self, tokens: int) -> int:
        """Whole windows in this many tokens."""
        return window_count(tokens, self.compress_size, self.compress_stride)

    @uncompiled
    @torch.no_grad()
    def append(
        self, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None = None, *, backend: str | None = None
    ) -> None:
        """Add new tokens, k `[B, n, kv_heads, D]` and v `[B, n, kv_heads, Dv]`; a prompt is added so where its outputs
        are not wanted.

        counts, int `[B]`, on the cache's device or on the CPU, says how many of the n are real in each sequence, the
        first ones; all by default. No gradient passes. Values of counts, lengths and pages are checked as everywhere:
        on the CPU always, on a GPU with TILEWISE_CHECK=1. The host waits for nothing else. backend is as in
        nsa_decode_step.
        """
        counts = check_new(self.stored, k, v, counts)
        # fp64 is for the reference alone.
        backend = resolve_backend(backend or ("reference" if self.dtype == torch.float64 else None), self.device)
        if backend != "reference":
            checks.check_not_fp64(self.stored.k, "the cache", backend)
        steps.write(self.stored, self.sizes, self.compress, k, v, counts, backend)
        # Last, so that a compression that raises leaves the cache as it was.
        steps.commit(self.stored, k.shape[1], counts, backend)

    def check(self) -> None:
        """Raise where tokens came that a sequence had no room for, or whose page does not exist, since its last reset;
        the host waits for the device.
        """
        for row, flag in enumerate(self.stored.flags.tolist()):
            if flag & FULL:
                raise ValueError(
                    f"sequence {row} is full: tokens came that were not stored, and their output is 0; max_len is"
                    f" {self.max_len}; make a longer cache, or reset it"
                )
            if flag & ASTRAY:
                raise ValueError(
                    f"sequence {row} has tokens in pages out of range, which were not stored: expected 0 to"
                    f" {len(self.stored.k) - 1} in its row of page_table; set its pages before tokens come"
                )

    def reset(self, rows: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Forget the sequences `rows`, or all of them, so that others take their place."""
        if isinstance(rows, torch.Tensor):
            rows = rows.flatten().tolist()
        chosen = list(range(self.batch)) if rows is None else [rows] if isinstance(rows, int) else list(rows)
        if any(isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < self.batch for row in chosen):
            raise ValueError(
                f"rows is {rows!r}: expected sequences of the cache, whole numbers from 0 to {self.batch - 1}"
            )
        at = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        self.stored.lengths.index_fill_(0, at, 0)
        self.stored.flags.index_fill_(0, at, 0)

    def gather(self, position: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: index `k` and `v`. Keys and values of each sequence at position [B, n, kv_heads or 1, K] where
        kept, zeros elsewhere: [B · n · kv_heads, K, D or Dv].
        """
        _warn("gather", "index k and v")
        row, head = (torch.arange(n, device=self.device) for n in (self.batch, self.kv_heads))
        k, v, _ = reference.take(self.stored, row[:, None, None, None], position, head[:, None], keep)
        return k.flatten(0, 2), v.flatten(0, 2)

    def compressed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Deprecated: use `k_cmp` and `v_cmp`. Compressed keys and values up to the longest sequence's,
        [B · kv_heads, C, D or Dv]; zeros behind a sequence's own.
        """
        _warn("compressed", "use k_cmp and v_cmp")
        return reference.compressed(self.stored, self.sizes, self.lengths, self.longest)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        table = self.stored.table
        if table is None:
            return x
        pages = table.long().clamp(0, len(x) - 1)
        return x[pages].flatten(1, 2)[:, : self.max_len]


def _warn(name: str, instead: str) -> None:
    warnings.warn(f"NSACache.{name} goes in 0.3.0: {instead}", DeprecationWarning, stacklevel=3)
