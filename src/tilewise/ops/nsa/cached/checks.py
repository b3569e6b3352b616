"""Checks of what comes to an NSACache. Each error says what was expected, what was passed and how to fix it."""

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import actual
from tilewise.ops.flash.decode.checks import PAGE_MULTIPLE, check_entries, check_pages, check_written
from tilewise.ops.nsa.cached.stored import Stored


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast chooses dtypes, not the caller."""
    kind = actual(device).type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def check_new(stored: Stored, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None) -> torch.Tensor | None:
    """All about new tokens, and, where values are checked, that there is room for them; returns counts on the
    cache's device.
    """
    batch, device = len(stored.lengths), stored.lengths.device
    for name, x, cache in (("k", k, stored.k), ("v", v, stored.v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if x.dim() != 4 or (x.shape[0], *x.shape[2:]) != (batch, *cache.shape[2:]):
            expected = f"[{batch}, n, {cache.shape[2]}, {cache.shape[3]}]"
            raise ValueError(f"{name} has shape {list(x.shape)}: the cache expects {expected}, for n new tokens")
        # Inside autocast the caller does not choose a dtype.
        if x.dtype != cache.dtype and not autocasts(device):
            raise TypeError(
                f"{name} is {x.dtype} and the cache holds {cache.dtype}: convert it, or make the cache with"
                f" dtype={x.dtype}"
            )
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and the cache is on {device}: move it there")
        checks.check_last_axis(x, name)
    new = k.shape[1]
    if v.shape[1] != new:
        raise ValueError(
            f"k has {new} new tokens and v has {v.shape[1]}: they must be equal (got shapes"
            f" {checks.shapes_of({'k': k, 'v': v})})"
        )
    if counts is not None:
        _check_counts(counts, batch, device, new)
    if checks.values_are_checked(stored.lengths):
        _check_room(stored, new, counts)
    return counts if counts is None else counts.to(device, non_blocking=True).contiguous()


def _check_counts(counts: torch.Tensor, batch: int, device: torch.device, new: int) -> None:
    if not isinstance(counts, torch.Tensor):
        raise TypeError(f"counts is a {type(counts).__name__}: expected an int32 or int64 torch.Tensor [{batch}]")
    if counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"counts is {counts.dtype}: expected int32 or int64")
    if counts.shape != (batch,):
        raise ValueError(
            f"counts has shape {list(counts.shape)}: expected [{batch}], how many of the new tokens each sequence has"
        )
    if counts.device.type != "cpu" and counts.device != device:
        raise ValueError(f"counts is on {counts.device} and the cache is on {device}: move it there, or to the CPU")
    if checks.values_are_checked(counts) and not bool(((counts >= 0) & (counts <= new)).all()):
        raise ValueError(f"counts is {counts.tolist()}: each must be from 0 to the {new} new tokens")


def _check_room(stored: Stored, new: int, counts: torch.Tensor | None) -> None:
    known = stored.lengths.tolist()
    added = [new] * len(known) if counts is None else counts.tolist()
    after = [a + b for a, b in zip(known, added, strict=True)]
    if max(after) > stored.room:
        row = after.index(max(after))
        raise ValueError(
            f"sequence {row} has {known[row]} tokens and {added[row]} come: max_len is {stored.room}; make a"
            " longer cache, or reset it"
        )
    if stored.table is not None:
        check_pages(stored.table.tolist(), known, after, *stored.k.shape[:2])


def check_pools(
    table: torch.Tensor | None,
    k_pages: torch.Tensor | None,
    v_pages: torch.Tensor | None,
    lengths: torch.Tensor,
    widths: tuple[int, int, int],
    dtype: torch.dtype,
    max_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pools that a cache keeps keys and values in: KV heads and channels of both are `widths`."""
    kv_heads, channels_k, channels_v = widths
    device = lengths.device
    if table is None or k_pages is None or v_pages is None:
        raise ValueError("page_table, k_pages and v_pages go together: give all three, or none")
    for name, x, channels in (("k_pages", k_pages, channels_k), ("v_pages", v_pages, channels_v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if x.dim() != 4 or tuple(x.shape[2:]) != (kv_heads, channels):
            expected = f"[pages, page_size, {kv_heads}, {channels}]"
            raise ValueError(f"{name} has shape {list(x.shape)}: expected {expected}")
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} and the cache holds {dtype}: they must be equal")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and the cache is on {device}: move it there")
        checks.check_last_axis(x, name)
        check_written(x, name)
    if v_pages.shape[:2] != k_pages.shape[:2]:
        raise ValueError(
            f"k_pages and v_pages must have the same pages (got shapes"
            f" {checks.shapes_of({'k_pages': k_pages, 'v_pages': v_pages})})"
        )
    page = k_pages.shape[1]
    if len(k_pages) == 0 or page == 0 or page % PAGE_MULTIPLE:
        raise ValueError(
            f"k_pages has {len(k_pages)} pages of {page} rows: expected at least one, of a multiple of"
            f" {PAGE_MULTIPLE} rows"
        )
    check_entries(table, "page_table", device, len(lengths), "[B, P]")
    if table.shape[1] * page < max_len:
        raise ValueError(
            f"page_table has room for {table.shape[1]} pages of {page} rows: expected at least"
            f" {-(-max_len // page)} pages, for max_len is {max_len}"
        )
    checks.check_last_axis(table, "page_table")
    return k_pages, v_pages
