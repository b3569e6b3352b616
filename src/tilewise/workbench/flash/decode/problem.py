"""Attention over a cache: the problem of its cases."""

import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from tilewise.verify.rounding import score_rounding, softmax_floor
from tilewise.verify.suite import Fill, Problem, Tensors, cumulative, cut, transposed
from tilewise.workbench.flash.cases import make_sinks

LAYOUTS = ("plain", "mixed", "mixed-aligned")
SINKS = ("", "plain", "large", "off")
# Slots behind the longest entry, and pages that belong to none: they hold NaN.
SPARE_SLOTS, SPARE_PAGES = 5, 3


@dataclass(frozen=True)
class Decode(Problem):
    """Entries of which `lengths` slots of the cache are in use, the first `leftpad` of them without a key; each brings
    `new` keys and T queries.

    With `queries` those are packed instead, a number an entry, as flash_attention takes them. Dense, or in pages of
    `page` rows in any order; `number`: one length for all. Hk and Dv are H and D where 0; `size` multiplies q.
    """

    outputs = ("o", "lse")
    exact = ("lse",)
    updates = ("k_cache", "v_cache")
    differentiable = False
    invariant = True
    returning: ClassVar[dict[str, Any]] = {"return_lse": True}

    lengths: tuple[int, ...] = (40, 0, 17)
    T: int = 1
    new: int = 0
    queries: tuple[int, ...] = ()
    H: int = 4
    Hk: int | None = None
    D: int = 16
    Dv: int | None = None
    page: int = 0
    leftpad: tuple[int, ...] = ()
    number: bool = False
    causal: bool = True
    window: tuple[int, ...] = ()
    softcap: float = 0.0
    scale: float | None = None
    sinks: str = ""
    splits: int = 0
    size: float = 1.0
    layout: str = "plain"

    def tensors(self, fill: Fill) -> Tensors:
        """q, the caches, what is new, and which keys there are. Every slot without a key holds NaN."""
        batch, kv_heads = len(self.lengths), self.Hk or self.H
        rows = (sum(self.queries),) if self.queries else (batch, self.T)
        q = fill("q", (*rows, self.H, self.D), self.size)
        slots = (batch, self.room, kv_heads)
        k_cache, v_cache = (self._used(fill(f"{name}_cache", (*slots, d), 1.0)) for name, d in self._channels())
        tensors = {"q": q}
        if self.page:
            table = self._table()
            k_cache, v_cache = self._in_pages(k_cache, table), self._in_pages(v_cache, table)
            tensors["page_table"] = table
        if self.new:
            tensors |= {name: fill(name, (batch, self.new, kv_heads, d), 1.0) for name, d in self._channels()}
        if self.layout != "plain":
            at = 3 if self.layout == "mixed" else 8
            tensors["q"] = cut(q, at) if self.queries else transposed(q)
            k_cache, v_cache = transposed(k_cache), cut(v_cache, at)
            tensors |= {"k": transposed(tensors["k"]), "v": cut(tensors["v"], at)} if self.new else {}
        tensors |= {"k_cache": k_cache, "v_cache": v_cache} | make_sinks(fill, self.sinks, self.H)
        tensors |= {} if self.number else {"cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32)}
        tensors |= {"leftpad_k": torch.tensor(self.leftpad)} if self.leftpad else {}
        return tensors | ({"cu_seqlens_q": cumulative(self.queries)} if self.queries else {})

    def _channels(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("k", self.D), ("v", self.Dv or self.D)

    def _used(self, x: torch.Tensor) -> torch.Tensor:
        """NaN in slots that are not in use, or hold padding."""
        slot = torch.arange(x.shape[1], device=x.device)
        first, end = (torch.tensor(n, device=x.device)[:, None] for n in (self.leftpad or [0], self.lengths))
        used = (slot < end) & (slot >= first)
        return x.where(used[:, :, None, None], torch.nan)

    def _table(self) -> torch.Tensor:
        """Pages in any order, which depends on the problem alone; -1 behind the used ones."""
        used = [-(-end // self.page) for end in self.tokens()]
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        order = torch.randperm(sum(used) + SPARE_PAGES, generator=generator).to(torch.int32)
        table = torch.full((len(used), -(-self.room // self.page)), -1, dtype=torch.int32)
        for row, pages in zip(table, order[: sum(used)].split(used), strict=True):
            row[: len(pages)] = pages
        return table

    def _in_pages(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        used = table >= 0
        pool = x.new_full((int(used.sum()) + SPARE_PAGES, self.page, *x.shape[2:]), torch.nan)
        behind = table.shape[1] * self.page - x.shape[1]
        rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, behind), value=torch.nan).unflatten(1, (-1, self.page))
        pool[table[used].long()] = rows[used]
        return pool

    def options(self) -> dict[str, Any]:
        """Only what differs from the defaults, so that an implementation may lack what a case does not use."""
        options: dict[str, Any] = {"cache_seqlens": self.lengths[0]} if self.number else {}
        # flash_attention's default, which packed queries are for, is another.
        options |= {"causal": self.causal} if self.causal == bool(self.queries) else {}
        options |= {"window_size": self.window} if self.window else {}
        options |= {"softcap": self.softcap} if self.softcap else {}
        options |= {"num_splits": self.splits} if self.splits else {}
        return options | ({"scale": self.scale} if self.scale is not None else {})

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """Of packed queries under flash_attention's names."""
        names = {"k_cache": "k", "v_cache": "v", "cache_seqlens": "seqused_k"} if self.queries else {}
        return {names.get(name, name): x for name, x in tensors.items()}

    def axes(self) -> dict[str, str]:
        """Batch, tokens, heads, channels, pages; without the batch where packed."""
        cache = "PTHD" if self.page else "BTHD"
        axes = {"q": "BTHD", "o": "BTHD", "lse": "BHT", "k": "BTHD", "v": "BTHD", "sinks": "H"}
        axes |= {name: axes[name].replace("B", "") for name in ("q", "o", "lse") if self.queries}
        return axes | {
            "k_cache": cache,
            "v_cache": cache,
            "cache_seqlens": "B",
            "leftpad_k": "B",
            "page_table": "BP",
        }

    def offsets(self) -> dict[str, str]:
        """Those of packed queries."""
        return dict.fromkeys(("q", "o", "lse"), "cu_seqlens_q") if self.queries else {}

    def elsewhere(self, inputs: Tensors) -> Iterator[tuple[str, tuple[Tensors, ...]]]:
        """Caches of more room, other pages, new keys that came in two calls: with strides as they were, for other
        kernels may take other ones.
        """
        names = ("k_cache", "v_cache")
        if self.page:
            order = torch.arange(len(inputs["k_cache"]), device=inputs["q"].device).flip(0)
            pools = {name: inputs[name][order] for name in names}
            table = inputs["page_table"]
            moved = torch.where(table < 0, table, len(order) - 1 - table)
            wide = torch.nn.functional.pad(moved, (0, 20), value=-1)
            yield "in other pages, of a wider table", (inputs | pools | {"page_table": wide},)
        elif self.layout == "plain":
            more = {
                name: torch.nn.functional.pad(inputs[name], (0, 0, 0, 0, 0, 300), value=torch.nan) for name in names
            }
            yield "in caches of more room", (inputs | more,)
        if self.new > 1 and not self.number and self.layout == "plain":
            old = {name: inputs[name].clone() for name in names}
            one, rest = ({name: inputs[name][:, at] for name in "kv"} for at in (slice(1), slice(1, None)))
            longer = {"cache_seqlens": inputs["cache_seqlens"] + 1}
            yield "new keys in two calls", (inputs | old | one, inputs | old | rest | longer)

    @property
    def room(self) -> int:
        """Slots of an entry."""
        return max(self.tokens()) + SPARE_SLOTS

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.Dv or 0)

    def tokens(self) -> tuple[int, ...]:
        """Each entry's keys, the new ones too."""
        return tuple(length + self.new for length in self.lengths)

    def scores(self) -> int:
        """Of each entry's queries."""
        queries = self.queries or (self.T,) * len(self.lengths)
        return sum(n * keys for n, keys in zip(queries, self.tokens(), strict=True))

    def twice_as_long(self) -> Self:
        """Twice the keys and queries."""
        return dataclasses.replace(self, lengths=tuple(2 * n for n in self.lengths), T=2 * self.T, new=2 * self.new)

    def check(self) -> None:
        """Sizes that a call can have."""
        sizes = (self.T, self.new, self.splits, *self.lengths, *self.queries, *self.leftpad)
        if not self.lengths or min(sizes) < 0 or self.H < 1 or min(self.D, self.Dv or self.D) < 1 or self.width > 256:
            raise ValueError("expected at least one length, no size negative, heads at least 1, channels from 1 to 256")
        if self.H % (self.Hk or self.H):
            raise ValueError(f"H={self.H} is not a multiple of Hk={self.Hk}")
        if len(self.window) not in (0, 2) or min(self.window, default=0) < -1:
            raise ValueError(
                f"window={'/'.join(map(str, self.window))}: expected two limits, such as 19/0, -1 for none"
            )
        if self.page % 16 or self.page < 0:
            raise ValueError(f"page={self.page}: expected a multiple of 16, or 0 for a dense cache")
        if any(given and len(given) != len(self.lengths) for given in (self.queries, self.leftpad)):
            raise ValueError("lengths, queries and leftpad must name the same number of entries")
        if self.leftpad and (self.page or max(self.leftpad) > self.room):
            raise ValueError("leftpad goes with a dense cache, and is at most its slots")
        if self.queries and (self.new or self.number):
            raise ValueError("packed queries bring no new keys, and have a length for each entry: leave new and number")
        if self.number and (len(set(self.lengths)) > 1 or self.page):
            raise ValueError("number=true wants equal lengths, and a dense cache")
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")
        if self.sinks not in SINKS:
            raise ValueError(f"there are no sinks {self.sinks!r}: expected one of {', '.join(SINKS[1:])}")

    def floor(self, name: str, truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs scores and LSE."""
        keys = [inputs[key].nan_to_num(0.0) for key in ("k_cache", "k") if key in inputs]
        score = max(score_rounding(inputs["q"], k, self.scale) for k in keys)
        return softmax_floor(name, score, truth["lse"], False)
