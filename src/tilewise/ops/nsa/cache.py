"""What decoding with native sparse attention keeps of each sequence: keys, values, and its windows compressed."""

from collections.abc import Callable, Sequence

import torch

from tilewise.ops._host import checks
from tilewise.ops.nsa.problem import Sizes, check_sizes, window_count

Compress = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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
            window for itself; B' and C' are whatever there is to compress. It may be given windows of zeros, whose
            result is dropped. By default windows are compressed to their means.
        dtype, device: of everything stored.

    `lengths` is int64 `[B]`, on the device; `k` and `v` are `[B, max_len, kv_heads, ·]` and `k_cmp` and `v_cmp`
    `[B, most windows, kv_heads, ·]`, of which a sequence's own tokens and whole windows are filled.
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
        check_sizes(Sizes(compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks))
        checks.check_whole(window_size, "window_size", 1)
        self.batch, self.max_len, self.kv_heads, self.D, self.Dv = batch, max_len, kv_heads, D, Dv
        self.compress_size, self.compress_stride = compress_size, compress_stride
        self.block_size, self.block_count, self.window_size = block_size, block_count, window_size
        self.init_blocks, self.local_blocks = init_blocks, local_blocks
        self.dtype = dtype
        self.compress = compress
        # Enough for `compressed` to round up, and one more.
        most = _rounded(self.windows(max_len))
        # A tensor made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            # By head, so that the keys of a block lie together. One row more than there are tokens: it stays zero. What
            # is masked is read there, and written there as zero; so no step needs
            # to know a length on the host.
            self._k, self._v = (
                torch.zeros(batch, kv_heads, max_len + 1, d, dtype=dtype, device=device) for d in (D, Dv)
            )
            self._k_cmp, self._v_cmp = (
                torch.zeros(batch, kv_heads, most + 1, d, dtype=dtype, device=device) for d in (D, Dv)
            )
            self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.device = self._k.device
        # The lengths as the host knows them: never below the true ones, and exact where `_exact`.
        self._known = [0] * batch
        self._exact = True

    @property
    def k(self) -> torch.Tensor:
        """Keys `[B, max_len, kv_heads, D]`."""
        return self._k[:, :, :-1].transpose(1, 2)

    @property
    def v(self) -> torch.Tensor:
        """Values `[B, max_len, kv_heads, Dv]`."""
        return self._v[:, :, :-1].transpose(1, 2)

    @property
    def k_cmp(self) -> torch.Tensor:
        """Compressed keys `[B, most windows, kv_heads, D]`."""
        return self._k_cmp[:, :, : self.windows(self.max_len)].transpose(1, 2)

    @property
    def v_cmp(self) -> torch.Tensor:
        """Compressed values `[B, most windows, kv_heads, Dv]`."""
        return self._v_cmp[:, :, : self.windows(self.max_len)].transpose(1, 2)

    @property
    def longest(self) -> int:
        """The most tokens that a sequence may have by now: exact, unless counts came on a GPU; then never below the
        truth.
        """
        return max(self._known)

    def windows(self, tokens: int) -> int:
        """Whole windows in this many tokens."""
        return window_count(tokens, self.compress_size, self.compress_stride)

    @torch.no_grad()
    def append(self, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Add new tokens, k `[B, n, kv_heads, D]` and v `[B, n, kv_heads, Dv]`; a prompt is added so where its outputs
        are not wanted.

        counts, int `[B]`, on the cache's device or on the CPU, says how many of the n are real in each sequence, the
        first ones; all by default. No gradient passes. Values of counts are checked as everywhere: on the CPU always,
        on a GPU with TILEWISE_CHECK=1; a GPU's are read by the host only where the cache may be full.
        """
        self._check_new(k, v, counts)
        new = k.shape[1]
        known, exact = self._make_room(new, counts)
        positions = self.lengths[:, None] + torch.arange(new, device=self.device)
        if counts is None:
            lengths = self.lengths + new
        else:
            # Counts that were not checked must not lead out of the store.
            counts = counts.to(self.device, torch.int64, non_blocking=True)
            lengths = (self.lengths + counts.clamp(0, new)).clamp(max=self.max_len)
            real = positions < lengths[:, None]
            positions = torch.where(real, positions, self.max_len)
            k, v = (x.masked_fill(~real[..., None, None], 0.0) for x in (k, v))
        row = torch.arange(self.batch, device=self.device)[:, None]
        self._write(self._k, row, positions, k)
        self._write(self._v, row, positions, v)
        if new:
            self._compress_new(lengths, new, known if exact and self._exact else None)
        # Last, so that a compression that raises leaves the cache as it was.
        self.lengths, self._known, self._exact = lengths, known, exact

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
        self.lengths = self.lengths.index_fill(0, at, 0)
        # The products read all windows up to the longest sequence's, and 0 times what was left there must be 0.
        self._k_cmp.index_fill_(0, at, 0.0)
        self._v_cmp.index_fill_(0, at, 0.0)
        for row in chosen:
            self._known[row] = 0
        self._exact = self._exact or rows is None

    def gather(self, position: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of each sequence at position [B, n, kv_heads or 1, K] where kept, zeros elsewhere: [B · n ·
        kv_heads, K, D or Dv].
        """
        own = torch.arange(self.batch * self.kv_heads, device=self.device).view(self.batch, 1, self.kv_heads, 1) * (
            self.max_len + 1
        )
        # What is not kept is not even read, so that it may be NaN.
        slots = (own + torch.where(keep, position, self.max_len)).flatten(0, 2)
        return self._k.flatten(0, 2)[slots], self._v.flatten(0, 2)[slots]

    def compressed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compressed keys and values up to the longest sequence's, rounded up: views [B · kv_heads, C, D or Dv]; zeros
        behind a sequence's own.
        """
        most = _rounded(self.windows(self.longest))
        return self._k_cmp[:, :, :most].flatten(0, 1), self._v_cmp[:, :, :most].flatten(0, 1)

    def _check_new(self, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None) -> None:
        for name, x, channels in (("k", k, self.D), ("v", v, self.Dv)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
            if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (self.batch, self.kv_heads, channels):
                expected = f"[{self.batch}, n, {self.kv_heads}, {channels}]"
                raise ValueError(f"{name} has shape {list(x.shape)}: the cache expects {expected}, for n new tokens")
            # Inside autocast the caller does not choose a dtype.
            if x.dtype != self.dtype and not autocasts(self.device):
                raise TypeError(
                    f"{name} is {x.dtype} and the cache holds {self.dtype}: convert it, or make the cache with"
                    f" dtype={x.dtype}"
                )
            if x.device != self.device:
                raise ValueError(f"{name} is on {x.device} and the cache is on {self.device}: move it there")
        if v.shape[1] != k.shape[1]:
            raise ValueError(
                f"k has {k.shape[1]} new tokens and v has {v.shape[1]}: they must be equal (got shapes"
                f" {checks.shapes_of({'k': k, 'v': v})})"
            )
        if counts is None:
            return
        if not isinstance(counts, torch.Tensor):
            raise TypeError(
                f"counts is a {type(counts).__name__}: expected an int32 or int64 torch.Tensor [{self.batch}]"
            )
        if counts.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"counts is {counts.dtype}: expected int32 or int64")
        if counts.shape != (self.batch,):
            raise ValueError(
                f"counts has shape {list(counts.shape)}: expected [{self.batch}], how many of the new tokens each"
                " sequence has"
            )
        if counts.device.type != "cpu" and counts.device != self.device:
            raise ValueError(
                f"counts is on {counts.device} and the cache is on {self.device}: move it there, or to the CPU"
            )

    def _make_room(self, new: int, counts: torch.Tensor | None) -> tuple[list[int], bool]:
        """The lengths after `new` tokens as the host knows them, and whether they are exact; raises where they are
        more than max_len.
        """
        added, exact, known = [new] * self.batch, self._exact, self._known
        if counts is not None and checks.values_are_checked(counts):
            added = counts.tolist()
            if not all(0 <= count <= new for count in added):
                raise ValueError(f"counts is {added}: each must be from 0 to the {new} new tokens")
        elif counts is not None:
            exact = False
        if not exact and max(a + b for a, b in zip(known, added, strict=True)) > self.max_len:
            # It may be full, or only seem so to the host: now the exact lengths are worth a synchronisation.
            known, exact = self.lengths.tolist(), True
            added = added if counts is None else counts.clamp(0, new).tolist()
        after = [a + b for a, b in zip(known, added, strict=True)]
        if max(after) > self.max_len:
            row = after.index(max(after))
            raise ValueError(
                f"sequence {row} has {known[row]} tokens and {added[row]} come: max_len is {self.max_len}; make a"
                " longer cache, or reset it"
            )
        return after, exact

    def _write(self, store: torch.Tensor, row: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> None:
        """x [B', m, kv_heads, D] into the sequences row [B', 1], at position [B', m]."""
        store.flatten(0, 2).index_put_((self._slots(store, row, position),), x.to(self.dtype))

    def _slots(self, store: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Where the flat store keeps the tokens at `position` of the sequences `row`: [.., kv_heads]."""
        head = torch.arange(self.kv_heads, device=self.device)
        return (row[..., None] * self.kv_heads + head) * store.shape[2] + position[..., None]

    def _compress_new(self, lengths: torch.Tensor, new: int, known: list[int] | None) -> None:
        """Compress the windows that `new` tokens complete; lengths are those after them, and `known` the same where the
        host knows all.
        """
        row, most = torch.arange(self.batch, device=self.device), -(-new // self.compress_stride)
        if known is not None:
            completed = [self.windows(b) - self.windows(a) for a, b in zip(self._known, known, strict=True)]
            most = max(completed)
            if most == 0:
                return
            if 0 in completed:
                row = torch.tensor([b for b, count in enumerate(completed) if count], device="cpu").to(
                    self.device, non_blocking=True
                )
        first, end = (
            ((x[row] - self.compress_size) // self.compress_stride + 1).clamp(min=0)[:, None]
            for x in (self.lengths, lengths)
        )
        window = first + torch.arange(most, device=self.device)
        whole = window < end
        position = window[..., None] * self.compress_stride + torch.arange(self.compress_size, device=self.device)
        position = torch.where(whole[..., None], position, self.max_len)
        at = self._slots(self._k, row[:, None, None], position)
        k, v = (store.flatten(0, 2)[at] for store in (self._k, self._v))
        compressed = (_mean(k), _mean(v)) if self.compress is None else self.compress(k, v)
        for name, store, x, channels in zip(
            ("k_cmp", "v_cmp"), (self._k_cmp, self._v_cmp), compressed, (self.D, self.Dv), strict=True
        ):
            expected = (*window.shape, self.kv_heads, channels)
            if x.shape != expected:
                raise ValueError(
                    f"compress returned {name} of shape {list(x.shape)}: expected {list(expected)}, one for each window"
                    " and head"
                )
            x = x.masked_fill(~whole[..., None, None], 0.0)
            self._write(store, row[:, None], torch.where(whole, window, store.shape[2] - 1), x)


def _rounded(windows: int) -> int:
    """This many windows, and up to 7 more: cuBLAS has fast 16-bit kernels for multiples of 8 only."""
    return -(-windows // 8) * 8


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(2, dtype=wide(x.dtype)).to(x.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulators' dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast chooses dtypes, not the caller."""
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
