"""Checks of attention over a cache. Each error says what was expected, what was passed and how to fix it."""

import collections

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.symbol import plain
from tilewise.ops.flash.decode.configs import room_of

# So that a tile of keys that is a matrix product's least lies in one page.
PAGE_MULTIPLE = 16


def check_no_gradient(function: str, **tensors: torch.Tensor | None) -> None:
    """Inference only: while grad mode is on, no input may require a gradient."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise RuntimeError(
                f"{name} requires grad: {function} is for inference and passes no gradient; call it under"
                f" torch.no_grad(), or give {name}.detach()"
            )


def check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool, paged: bool, names: tuple[str, str]
) -> None:
    """q, and the caches or pools called `names`: ranks, dtypes, devices, heads and channels that fit."""
    name_k, name_v = names
    shape_q = checks.check_attention_tensors({"q": q}, packed)[0]
    layout = "[pages, page_size, Hk, D], pools, since page_table is given" if paged else "[B, T_max, Hk, D]"
    shapes = checks.check_attention_tensors({name_k: k, name_v: v}, False, layout)
    for name, x in ((name_k, k), (name_v, v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name} is {x.dtype} and q is {q.dtype}: convert them to one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q is on {q.device}: move them to one device")
    # Entries are compared where the batch is an axis of both.
    checks.check_fit({"q": q, name_k: k, name_v: v}, [shape_q, *shapes], packed or paged)
    if paged and (plain(k.shape[1]) == 0 or plain(k.shape[1]) % PAGE_MULTIPLE):
        raise ValueError(
            f"{name_k} has pages of {k.shape[1]} rows: expected a multiple of {PAGE_MULTIPLE} (got shape"
            f" {list(k.shape)})"
        )


def check_entries(x: torch.Tensor, name: str, device: torch.device, batch: int, axes: str = "[B]") -> None:
    """Numbers of the entries, or their pages: int32 or int64, on q's device."""
    if not isinstance(x, checks.TENSORS):
        raise TypeError(f"{name} is a {type(x).__name__}: expected an int32 or int64 torch.Tensor {axes}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {x.dtype}: expected int32 or int64")
    if x.dim() != (1 if axes == "[B]" else 2) or x.shape[0] != batch:
        raise ValueError(f"{name} has shape {list(x.shape)}: expected {axes}, of {batch} entries")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and q is on {device}: move it there")


def check_new(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
) -> None:
    """New keys and values: both or neither, like the caches."""
    if (k is None) != (v is None):
        given, lacking = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"{given} is given without {lacking}: give both to append, or neither")
    if k is None or v is None:
        return
    checks.check_attention_tensors({"q": q, "k": k, "v": v}, False)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(x.shape) != expected:
            raise ValueError(
                f"{name} has shape {list(x.shape)}: expected {list(expected)}, the new tokens of each entry with the"
                f" heads and channels of {name}_cache"
            )
        check_written(cache, f"{name}_cache")


def check_written(cache: torch.Tensor, name: str) -> None:
    """A cache or a pool that is written holds each row once."""
    if any(stride == 0 and size > 1 for size, stride in zip(cache.shape[:-1], cache.stride()[:-1], strict=True)):
        raise ValueError(
            f"{name} is expanded, with strides {list(cache.stride())}: what is written for one entry or head would be"
            f" another's too; give {name}.contiguous()"
        )


def check_length(k: torch.Tensor, table: torch.Tensor | None, at: int | None, new: int) -> None:
    """What the host knows: there is room for `new` tokens, behind `at` others where one number is given for all."""
    room = room_of(k, table)
    if (0 if at is None else at) + new > room:
        before = "" if at is None else f"cache_seqlens is {at} and "
        raise ValueError(f"{before}{new} tokens come: the cache has room for {room}")


def check_values(
    k: torch.Tensor,
    lengths: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    added: int,
    new: int = 0,
) -> None:
    """Lengths, padding and pages within their tensors, where values are checked: entry b has lengths[b] + `added` keys,
    the last `new` of which are to be written.
    """
    room = room_of(k, table)
    checked = [x for x in (lengths, leftpad, table) if x is not None and checks.values_are_checked(x)]
    if not checked:
        return
    batch = checked[0].shape[0]
    ends = [added] * batch if lengths is None else [n + added for n in lengths.tolist()]
    for b, end in enumerate(ends):
        if not added <= end <= room:
            come = f", and {added} come" if added else ""
            raise ValueError(
                f"entry {b} has length {end - added}{come}: expected 0 to {room - added}, for there is room for {room}"
                " keys"
            )
    for b, padding in enumerate([] if leftpad is None else leftpad.tolist()):
        if not 0 <= padding <= room:
            raise ValueError(f"leftpad_k is {padding} for entry {b}: expected 0 to {room}")
    if table is not None:
        check_pages(table.tolist(), [end - new for end in ends], ends, k.shape[0], k.shape[1])


def check_pages(table: list[list[int]], starts: list[int], ends: list[int], pages: int, page_size: int) -> None:
    """The pages of all keys up to `ends` exist, and those that are written, from `starts` on, are named once."""
    used = [row[: -(-end // page_size)] for row, end in zip(table, ends, strict=True)]
    for b, row in enumerate(used):
        for i, page in enumerate(row):
            if not 0 <= page < pages:
                raise ValueError(
                    f"page_table holds {page} at [{b}, {i}], which entry {b} uses: expected 0 to {pages - 1}, for there"
                    f" are {pages} pages"
                )
    named = collections.Counter(page for row in used for page in row)
    for b, (row, start, end) in enumerate(zip(used, starts, ends, strict=True)):
        for page in row[start // page_size :] if start < end else ():
            if named[page] > 1:
                raise ValueError(
                    f"page {page} is written for entry {b}, and page_table names it {named[page]} times: a page that is"
                    " written belongs to one place of one entry; copy it first"
                )
