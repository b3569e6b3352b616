"""flash_attention over the ranks of a ContextPlan: which keys come when, and how parts become results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops._host.register import uncompiled
from tilewise.ops.flash.api import flash_attention
from tilewise.parallel import parts, ring
from tilewise.parallel.assignment import planning
from tilewise.parallel.calls import Call, calls, gathered, nothing
from tilewise.parallel.exchange import Fetch, Once, Pending
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.plan import ContextPlan

Tensor = torch.Tensor

# K and V of the heads that are fetched at a time, at most, in bytes; one KV head at least.
FETCHED_BYTES = 1 << 28


class Options(NamedTuple):
    """A call's options; window limits of -1 are none."""

    window: tuple[int, int]
    scale: float
    softcap: float
    deterministic: bool
    backend: str

    def of(self, call: Call) -> tuple[Any, ...]:
        """As the operators take them for a part."""
        return False, call.left, call.right, self.scale, self.softcap, self.deterministic, self.backend


@uncompiled
def attend(
    plan: ContextPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE of this rank's queries."""
    checks.check_qkv(q, k, v, plan.packed)
    checks.check_window(window_size)
    checks.check_number(softcap, "softcap", minimum=0.0)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        checks.check_number(scale, "scale")
    axis = 0 if plan.packed else 1
    for name, x in (("q", q), ("k", k), ("v", v)):
        plan.check_local(x, name, axis)
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    if sinks is not None:
        checks.check_sinks(sinks, q, backend)
        checks.check_sink_values(sinks)
        sinks = sinks.contiguous()
    left, right = window_size
    window = left, 0 if causal else right
    options = Options(window, checks.as_float(scale), checks.as_float(softcap), deterministic, backend)
    shapes = [[*x.shape[:axis], "tokens", *x.shape[axis + 1 :]] for x in (q, k, v)]
    given = {"q": q, "k": k, "v": v, **({} if sinks is None else {"sinks": sinks})}
    wanted = [name for name, x in given.items() if torch.is_grad_enabled() and x.requires_grad]
    plan.agree(f"flash_attention({', '.join(given)}) of {shapes} {q.dtype}, {options}, gradients {wanted}", q.device)
    if backend == "reference":
        return _by_reference(plan, q, k, v, sinks, options)
    function = Gathered if plan.method == "all_gather" else ring.Ring
    return function.apply(q, k, v, sinks, plan, options)


def _by_reference(
    plan: ContextPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    """The definition: all keys that are seen, fetched at once."""
    rows = Rows(plan.packed)
    # As one tensor, so that gradients of both go home, on every rank, whatever the loss reads.
    fetched = Fetch.apply(rows.first(torch.cat((k, v), -1)), plan.exchange(options.window, q.device))
    keys, values = rows.back(fetched).split((k.shape[-1], v.shape[-1]), -1)
    results, places = [], []
    # A rank without tokens makes a call of none, so that it takes part in the others' backward.
    for call in calls_of(plan, options.window, rows.count(keys), q.device) or [nothing(plan.packed, q.device)]:
        results.append(
            flash_attention(
                rows.take(q, call.rows),
                rows.take(keys, call.keys),
                rows.take(values, call.keys),
                window_size=(call.left, call.right),
                scale=options.scale,
                softcap=options.softcap,
                cu_seqlens_q=call.cu_q,
                cu_seqlens_k=call.cu_k,
                sinks=sinks,
                return_lse=True,
                backend="reference",
            )
        )
        places.append(rows.numbers(call.rows, q.device))
    back = torch.argsort(torch.cat(places))
    o = torch.cat([o for o, _ in results], rows.axis).index_select(rows.axis, back)
    return o, torch.cat([lse for _, lse in results], -1).index_select(-1, back)


@planning
def calls_of(
    plan: ContextPlan,
    window: tuple[int, int],
    key_rows: int,
    device: torch.device,
    fetched: tuple[int, int] | None = None,
) -> list[Call]:
    """This rank's, over the keys that were `fetched` by a window, this one where there is no other."""
    key = "gathered", window, device, fetched
    if key not in plan.kept:
        lists = gathered(plan.segments(plan.rank), plan.needs(fetched or window), window)
        plan.kept[key] = list(calls(lists, plan.packed, key_rows, device))
    return plan.kept[key]


class Heads(NamedTuple):
    """Some KV heads, and the query heads that read them."""

    keys: slice
    queries: slice


def heads_that_fit(count: int, bytes_a_head: int) -> int:
    """How many of so many KV heads are fetched at a time."""
    return min(count, max(1, FETCHED_BYTES // max(1, bytes_a_head)))


def heads_at_a_time(plan: ContextPlan, q: Tensor, k: Tensor, v: Tensor) -> list[Heads]:
    """Heads whose K and V of the whole batch fit into FETCHED_BYTES: the same on all ranks."""
    batch = 1 if plan.packed else k.shape[0]
    a_head = batch * plan.tokens * (k.shape[-1] + v.shape[-1]) * k.element_size()
    count, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    ends = [*range(0, count, heads_that_fit(count, a_head)), count]
    return [Heads(slice(a, b), slice(a * group, b * group)) for a, b in itertools.pairwise(ends)]


class Fetching:
    """K and V of some heads after others: the next are on their way while one computes with these."""

    def __init__(
        self, plan: ContextPlan, window: tuple[int, int], k: Tensor, v: Tensor, heads: Sequence[Heads]
    ) -> None:
        self._exchange = plan.exchange(window, k.device)
        self._rows = Rows(plan.packed)
        self._k, self._v, self._heads = k, v, heads

    def _start(self, of: Heads) -> tuple[Pending, Pending]:
        k, v = (self._exchange.fetch(self._rows.first(x[..., of.keys, :])) for x in (self._k, self._v))
        return k, v

    def __iter__(self) -> Iterator[tuple[Heads, list[Tensor]]]:
        """K and V in a list, which is emptied before the next are put in order."""
        coming = self._start(self._heads[0])
        for i, of in enumerate(self._heads):
            here = [self._rows.back(x.wait()) for x in coming]
            if i + 1 < len(self._heads):
                coming = self._start(self._heads[i + 1])
            yield of, here
            here.clear()


class Homing:
    """Gradients of K and V of some heads after others, on their way to their own ranks, where they fill dk and dv."""

    def __init__(self, plan: ContextPlan, window: tuple[int, int], dk: Tensor, dv: Tensor) -> None:
        self._exchange, self._rows = plan.exchange(window, dk.device), Rows(plan.packed)
        self._to = dk, dv
        self._going: tuple[Heads, list[Pending]] | None = None

    def send(self, heads: Heads, gradients: list[Tensor]) -> None:
        """Once those that were sent before have arrived; empties the list."""
        self.arrive()
        self._going = heads, [self._exchange.bring_home(self._rows.first(x)) for x in gradients]
        gradients.clear()

    def arrive(self) -> None:
        """Wait for what was sent last."""
        if self._going is not None:
            heads, pending = self._going
            for x, part in zip(self._to, pending, strict=True):
                x[..., heads.keys, :] = self._rows.back(part.wait())
            self._going = None


class Gathered(torch.autograd.Function):
    """Keys and values that are seen come here, some heads at a time; their gradients go home."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: ContextPlan, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of local queries."""
        ctx.plan, ctx.options = plan, options
        ctx.set_materialize_grads(False)
        rows = Rows(plan.packed)
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
        for heads, here in Fetching(plan, options.window, k, v, heads_at_a_time(plan, q, k, v)):
            some_sinks = None if sinks is None else sinks[heads.queries]
            for call in calls_of(plan, options.window, rows.count(here[0]), q.device):
                o_part, lse_part = parts.attend(call, rows, options, q[..., heads.queries, :], here, some_sinks)
                rows.put(o[..., heads.queries, :], call.rows, o_part)
                rows.put_lse(lse[..., heads.queries, :], call.rows, lse_part)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of local q, k and v; this rank's part of dsinks."""
        return *Once.apply(Gathered.differentiate, ctx.plan, ctx.options, *gradients, *ctx.saved_tensors), None, None

    @staticmethod
    def differentiate(
        plan: ContextPlan,
        options: Options,
        do: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """The backward."""
        do = torch.zeros_like(o) if do is None else do
        rows = Rows(plan.packed)
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        # Parts of many calls are summed up.
        wide_sinks = None if sinks is None else sinks.float()
        dsinks = None if wide_sinks is None else torch.zeros_like(wide_sinks)
        homing = Homing(plan, options.window, dk, dv)
        for heads, here in Fetching(plan, options.window, k, v, heads_at_a_time(plan, q, k, v)):
            some = [None if x is None else x[..., heads.queries, :] for x in (dq, do, q, o, dlse, lse)]
            some_sinks = [None if x is None else x[heads.queries] for x in (wide_sinks, dsinks)]
            calls_here = calls_of(plan, options.window, rows.count(here[0]), q.device)
            homing.send(heads, parts.differentiate(calls_here, rows, options, some, here, some_sinks))
        homing.arrive()
        return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
