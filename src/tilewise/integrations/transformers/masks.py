"""From transformers' mask functions to what `flash_attention` is told.

transformers describes a mask by a function of indices, composed of a few known ones; their names and what they close
over say which. What is found travels to the layers as an attribute of the mask's tensor: a model that replaces the
tensor loses it, and the layer raises.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)

from tilewise.integrations.transformers.refuse import Refuse

Tensor = torch.Tensor
INSTEAD = 'use attn_implementation="sdpa" or "eager"'
CHOSEN_KEYS = "a choice of keys (indices, as DeepSeek V3.2 has)"
_CALLED = {
    "chunked_overlay": "chunked attention",
    "blockwise_overlay": "blocks of tokens that see each other, as those of an image",
}


class Rows(NamedTuple):
    """A batch as packed sequences: which of its rows take part, all where None, and the offsets.

    `leading`: each sequence has the first keys of one row of the batch.
    """

    q: Tensor | None
    k: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    leading: bool = False

    def queries(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` to `[N, ...]`, of the queries that take part."""
        return _take(x, self.q)

    def keys(self, x: Tensor) -> Tensor:
        """The same of the keys."""
        return _take(x, self.k)

    def back(self, o: Tensor, batch: int, length: int) -> Tensor:
        """What queries got, `[N, ...]`, to `[B, T, ...]`; padding gets zeros."""
        if self.q is not None:
            o = o.new_zeros(batch * length, *o.shape[1:]).index_copy(0, self.q, o)
        return o.unflatten(0, (batch, length))


class Mask(NamedTuple):
    """What the queries of a layer see."""

    q_length: int
    kv_length: int
    causal: bool
    window: tuple[int, int]
    # The first so many keys exist: a number, or on the device and for inference, [B].
    keys: int
    lengths: Tensor | None = None
    leftpad: Tensor | None = None
    rows: Rows | None = None
    # The whole mask, [B, 1, q_length, kv_length], for sdpa; and what of it sdpa has to compute, if anything.
    full: Callable[[], Tensor] | None = None
    refused: str = ""


class Pattern:
    """A mask function as limits on the distance between query and key, and sequences that do not see each other.

    Attributes:
        left, right: how far a query sees before and behind its own position; -1: no limit.
        packed: the sequence of each token, [B, T], where there are several in a row.
        unknown: the name of a part that is none of these.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.left = self.right = -1
        self.packed: Tensor | None = None
        self.unknown = ""
        self._remapped = False
        self._read(function)
        if self._remapped and self.packed is None and not self.unknown:
            self.unknown = "positions of the caller's own"

    def _read(self, function: Callable[..., Any]) -> None:
        name, held = _parts(function)
        if function is causal_mask_function:
            self.right = 0
        elif function is bidirectional_mask_function:
            pass
        elif name == "and_masks":
            for part in held["mask_functions"]:
                self._read(part)
        elif name == "sliding_window_overlay":
            self.left = _narrower(self.left, held["sliding_window"] - 1)
        elif name == "sliding_window_bidirectional_overlay":
            self.left = _narrower(self.left, held["sliding_window"])
            self.right = _narrower(self.right, held["sliding_window"])
        elif name == "packed_sequence_mask_function" and self.packed is None:
            self.packed = held["packed_sequence_mask"]
        elif name == "remap_positions_for_packed_sequence":
            # Within a sequence positions differ as indices do: that is how sequences were found.
            self._remapped = True
            self._read(held["mask_function"])
        else:
            self.unknown = self.unknown or _describe(function)

    @property
    def window(self) -> tuple[int, int]:
        """As flash_attention takes it, causal apart."""
        return (self.left, self.right) if self.is_window else (-1, -1)

    @property
    def is_window(self) -> bool:
        """Whether distance matters beyond causality."""
        return self.left >= 0 or self.right > 0


def _narrower(a: int, b: int) -> int:
    return b if a < 0 else min(a, b)


def _parts(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The function of masking_utils that made it, and what it closes over."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return "", {}
    cells = getattr(function, "__closure__", None) or ()
    held = {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
    return function.__qualname__.partition(".<locals>")[0], held


def _describe(function: Callable[..., Any]) -> str:
    name, held = _parts(function)
    if name == "or_masks":
        return f"a union of masks ({', '.join(map(_describe, held['mask_functions']))})"
    if name == "and_masks":
        return f"({' and '.join(map(_describe, held['mask_functions']))})"
    return _CALLED.get(name) or name or f"mask function {getattr(function, '__qualname__', function)}"


def mask(refuse: Refuse) -> Callable[..., Tensor]:
    """What AttentionMaskInterface wants, made once a forward for all layers of a kind."""

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        config: Any = None,
        **_: Any,
    ) -> Tensor:
        if getattr(config, "index_topk", None) is not None:
            # Its indexer computes with the mask before any layer is asked.
            refuse(CHOSEN_KEYS, 'use attn_implementation="eager"', sdpa=False)
        if isinstance(q_offset, Tensor):
            # The cache counts on in that tensor before the layers run.
            q_offset = int(q_offset) if torch.is_grad_enabled() else q_offset.clone()
        full = partial(
            sdpa_mask,
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,  # type: ignore[arg-type, unused-ignore]
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        pattern = Pattern(mask_function)
        found = Mask(q_length, kv_length, pattern.right == 0, pattern.window, kv_length, full=full)
        keep = torch.ones(1, kv_length, dtype=torch.bool, device=device)
        if attention_mask is not None:
            keep = prepare_padding_mask(attention_mask, kv_length, kv_offset)[:, kv_offset : kv_offset + kv_length]
        wrong = pattern.unknown
        if not wrong and pattern.packed is not None:
            found = found._replace(rows=_packed(pattern.packed))
        elif not wrong:
            found, wrong = _placed(found, pattern, q_offset - kv_offset + q_length, keep.expand(batch_size, -1))
        if wrong:
            refuse(f"a mask of {wrong}", INSTEAD)
            found = found._replace(refused=wrong)
        # Without elements: a model that computes with it by itself fails, and a copy is known for one.
        carrier: Any = keep.new_empty(batch_size, 1, 0, 0)
        carrier.tilewise_mask = found
        return carrier

    # Its values decide which kernel runs. Compiled decoding calls it before the compiled region.
    return cast(Callable[..., Tensor], torch.compiler.disable(make_mask))


def _packed(sequence: Tensor) -> Rows:
    """Offsets of sequences end to end, those of each row of the batch after those of the row before."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    first = starts.flatten().nonzero()[:, 0]
    offsets = torch.cat([first, first.new_tensor([sequence.numel()])]).to(torch.int32)
    return Rows(None, None, offsets, offsets)


def _placed(found: Mask, pattern: Pattern, used: int | Tensor, keep: Tensor) -> tuple[Mask, str]:
    """The mask with the lengths and padding of a batch, or what it cannot have.

    The last query stands at key `used - 1`; keep says which keys exist, `[B, kv_length]`.
    """
    if pattern.right != 0:
        if pattern.is_window and int(used) != found.kv_length:
            return found, "a window to both sides over a cache that is not full"
        used = found.kv_length
    elif not isinstance(used, Tensor) and not 0 <= used <= found.kv_length:
        return found, f"a last query at position {used - 1} of {found.kv_length} keys"
    at = torch.arange(found.kv_length, device=keep.device)
    exists = at < used
    keep = keep & exists
    counts = keep.sum(1)
    first, end = at.where(keep, found.kv_length).amin(1), (at + 1).where(keep, 0).amax(1)
    # In one read: is there no padding, is it on the left alone, are every row's keys in one piece, are they its first.
    whole, left, piece, leading = torch.stack(
        [
            (keep == exists).all(),
            (keep == exists & (at >= used - counts[:, None])).all(),
            ((end - first == counts) | (counts == 0)).all(),
            (keep == (at < counts[:, None])).all(),
        ]
    ).tolist()
    inference = not torch.is_grad_enabled()
    if whole or (left and inference):
        leftpad = None if whole else (used - counts).to(torch.int32)
        if isinstance(used, Tensor):
            return found._replace(lengths=used.expand(len(keep)).to(torch.int32), leftpad=leftpad), ""
        return found._replace(keys=used, leftpad=leftpad), ""
    if pattern.is_window and not piece:
        return found, "a window over keys with padding between them"
    used = int(used)
    if (pattern.is_window or found.causal) and used < found.q_length:
        return found, "a padded batch whose first queries stand before its first key"
    keep = keep[:, :used]
    # Where no distance counts, padded queries see what the others do; elsewhere they have no place in their sequence.
    queries = keep[:, used - found.q_length :] if pattern.is_window or found.causal else None
    q_counts = torch.full_like(counts, found.q_length) if queries is None else queries.sum(1)
    of_queries = None if queries is None else _indices(queries)
    rows = Rows(of_queries, _indices(keep), _offsets(q_counts), _offsets(counts), leading)
    return found._replace(keys=used, rows=rows), ""


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    x = x.reshape(-1, *x.shape[2:])
    return x if rows is None else x.index_select(0, rows)


def _indices(keep: Tensor) -> Tensor:
    return keep.flatten().nonzero()[:, 0]


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
