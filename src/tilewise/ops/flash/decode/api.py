"""`flash_attention_with_kvcache`, and flash_attention's calls over a cache: checks, choice of backend."""

import contextlib
from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import HAS_TRITON, resolve_backend
from tilewise.ops._host.register import register
from tilewise.ops.flash.cpu import Options
from tilewise.ops.flash.decode import cpu, reference
from tilewise.ops.flash.decode.checks import (
    check_entries,
    check_length,
    check_new,
    check_no_gradient,
    check_tensors,
    check_values,
)

if HAS_TRITON:
    from tilewise.ops.flash.decode import launch

Tensor = torch.Tensor


def flash_attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int,
    leftpad_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Write new keys and values into a cache, in place, and attend to all of it from new queries: a step of decoding,
    or a prefill.

    Args:
        q: queries `[B, Tq, Hq, D]`. fp16, bf16 or fp32; D from 1 to 256. The last axis must be contiguous, every other
            stride is free; so for all tensors.
        k_cache: `[B, T_max, Hk, D]`, or with page_table a pool of pages `[pages, page_size, Hk, D]`, page_size a
            multiple of 16. Hq must be a multiple of Hk: query head h reads KV head `h // (Hq // Hk)`.
        v_cache: the same with Dv channels.
        k, v: new keys `[B, Tn, Hk, D]` and values `[B, Tn, Hk, Dv]`: both, or neither where the caches hold all. Tn may
            differ from Tq. Written at positions cache_seqlens[b] to cache_seqlens[b] + Tn - 1.
        cache_seqlens: slots in use before the call, left padding included: int32 or int64 `[B]` on q's device, or one
            number for all. Not changed: add Tn for the next step.
        leftpad_k: int32 or int64 `[B]`: the first leftpad_k[b] slots hold no keys. Not with page_table.
        page_table: int32 or int64 `[B, P]`: key j of entry b is row `j % page_size` of page
            `page_table[b, j // page_size]`. Entries behind the used ones are not read; entries of the batch may share
            pages, but not those that are written.
        causal: query i of Tq sees keys up to its own position; the last query stands at the last key.
        window_size: (left, right), as in flash_attention.
        scale: any finite number, by default `D ** -0.5`.
        softcap: where > 0, scores become `softcap · tanh(score / softcap)` before the mask.
        sinks: `[Hq]`: one more logit a head in every row's softmax, which has no value; -inf for none.
        num_splits: into how many parts an entry's keys are split, to be computed at once; 0 chooses by the entry's own
            numbers, 1 never splits.
        return_lse: also return the LSE.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device.

    Returns:
        The output `[B, Tq, Hq, Dv]` in q's dtype. With return_lse also the LSE, fp32 `[B, Hq, Tq]`. A row that sees no
        key gives 0 and -inf, or its sink.

    For inference: it raises where grad mode is on and a tensor requires grad. The host never waits for the device, so a
    call can be captured in a CUDA graph and replayed with other lengths and pages in the same tensors. An entry's
    result depends on nothing but that entry, and repeats bit for bit. On Hopper, more than 64 queries over a dense
    cache have a kernel of their own: their last bits are not those of the same keys in pages.

    Lengths and pages are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation); unchecked, what does not fit is neither read nor written.
    """
    check_no_gradient("flash_attention_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, sinks=sinks)
    at = 0
    lengths: Any = cache_seqlens
    if isinstance(cache_seqlens, checks.WHOLE_NUMBERS):
        checks.check_whole(cache_seqlens, "cache_seqlens", 0)
        lengths, at = None, cache_seqlens
    elif not isinstance(cache_seqlens, checks.TENSORS):
        raise TypeError(
            f"cache_seqlens is a {type(cache_seqlens).__name__}: expected an int32 or int64 torch.Tensor [B], or one"
            " whole number"
        )
    given = (q, k_cache, v_cache, k, v, None, lengths, leftpad_k, page_table, sinks)
    options = (None, at, causal, window_size, scale, softcap, num_splits, backend)
    o, lse = _call(given, options, True)
    if k is not None and not torch.compiler.is_compiling():
        # As every operation in place does, for who keeps them for a backward.
        torch.autograd.graph.increment_version([x for x in (k_cache, v_cache) if not x.is_inference()])
    return (o, lse) if return_lse else o


def attend_cached(
    given: tuple[Any, ...], options: tuple[Any, ...], return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """flash_attention over keys of which some exist.

    Given q, k, v, cu_seqlens_q, seqused_k, leftpad_k, page_table and sinks; options are max_seqlen_q, causal,
    window_size, scale, softcap, num_splits and backend.
    """
    q, k, v, *entries = given
    max_q, *others = options
    _, lengths, _, table, sinks = entries
    check_no_gradient("flash_attention with seqused_k, leftpad_k or page_table", q=q, k=k, v=v, sinks=sinks)
    if table is not None and lengths is None:
        raise ValueError("page_table is given without seqused_k: give the number of keys of each entry, [B]")
    # Without lengths all keys exist.
    at = 0 if lengths is not None or not isinstance(k, checks.TENSORS) or k.dim() != 4 else k.shape[1]
    o, lse = _call((q, k, v, None, None, *entries), (max_q, at, *others), False)
    return (o, lse) if return_lse else o


def _call(given: tuple[Any, ...], options: tuple[Any, ...], is_cache: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q = given[0]
    prepare = _prepare_cache if is_cache else _prepare_keys
    # Neither does a cache change its dtype, nor what is computed in fp32.
    on = isinstance(q, torch.Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if on else contextlib.nullcontext():
        operator = flash_decode if given[3] is None else flash_decode_append
        made = operator.call(given, options, prepare)
        return _by_reference(*given, *options) if made is None else made


def _prepare_cache(*arguments: Any) -> tuple[Any, ...] | None:
    return _prepare(("k_cache", "v_cache"), "cache_seqlens", *arguments)


def _prepare_keys(*arguments: Any) -> tuple[Any, ...] | None:
    return _prepare(("k", "v"), "seqused_k", *arguments)


def _prepare(
    names: tuple[str, str],
    name: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_q: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    max_q: int | None,
    at: int,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    num_splits: int,
    backend: str | None,
) -> tuple[Any, ...] | None:
    """The operator's arguments, checked; None where the reference is to compute."""
    checks.check_window(window_size)
    checks.check_number(softcap, "softcap", minimum=0.0)
    checks.check_whole(num_splits, "num_splits", 0)
    if max_q is not None:
        checks.check_number(max_q, "max_seqlen_q", minimum=0)
    check_tensors(q, k_cache, v_cache, cu_q is not None, table is not None, names)
    check_new(q, k_cache, v_cache, k, v)
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    if cu_q is not None:
        checks.check_offsets_tensor(cu_q, "cu_seqlens_q", q.device, q.shape[0])
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if table is None and k_cache.shape[0] != batch:
        raise ValueError(f"{names[0]} has batch {k_cache.shape[0]} and cu_seqlens_q holds {batch}: they must be equal")
    if leftpad is not None and table is not None:
        raise ValueError("leftpad_k and page_table are both given: pages hold no padding; leave leftpad_k out")
    for what, x in ((name, lengths), ("leftpad_k", leftpad)):
        if x is not None:
            check_entries(x, what, q.device, batch)
    if table is not None:
        check_entries(table, "page_table", q.device, batch, "[B, P]")
    check_length(k_cache, table, at if lengths is None else None, 0 if k is None else k.shape[1])
    if sinks is not None:
        checks.check_sinks(sinks, q, backend)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        checks.check_number(scale, "scale")
    if backend == "reference":
        return None
    left, right = window_size
    new = () if k is None else (k, v)
    numbers = (x if x is None else x.contiguous() for x in (cu_q, lengths, leftpad, table, sinks))
    scales = checks.as_float(scale), checks.as_float(softcap)
    return q, k_cache, v_cache, *new, *numbers, max_q, at, causal, left, right, *scales, num_splits, backend


def _by_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_q: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    max_q: int | None,
    at: int,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    new = 0 if k is None else k.shape[1]
    _check_values(q, k_cache, cu_q, lengths, leftpad, table, sinks, max_q, at + new, new)
    if k is not None and v is not None:
        reference.append(k_cache, k, lengths, at, table)
        reference.append(v_cache, v, lengths, at, table)
    left, right = window_size
    return reference.attend_cached(
        q,
        k_cache,
        v_cache,
        causal=causal,
        window_size=(left, right),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        cu_seqlens_q=cu_q,
        seqused_k=lengths,
        added=at + new,
        leftpad_k=leftpad,
        page_table=table,
    )


def _check_values(
    q: Tensor,
    k: Tensor,
    cu_q: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    max_q: int | None,
    added: int,
    new: int = 0,
) -> None:
    if cu_q is not None:
        checks.check_offset_values(cu_q, "cu_seqlens_q", q.shape[0], max_q, "max_seqlen_q")
    check_values(k, lengths, leftpad, table, added, new)
    if sinks is not None:
        checks.check_sink_values(sinks)


def _run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    max_q: int | None,
    added: int,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    num_splits: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_values(q, k, cu_q, lengths, leftpad, table, sinks, max_q, added)
    if backend == "cpu":
        options = Options(causal, (left, right), scale, softcap, sinks)
        return cpu.forward(q, k, v, cu_q, lengths, leftpad, table, added, options)
    inputs = launch.make_inputs(
        q, k, v, cu_q, lengths, leftpad, table, sinks, added, causal, left, right, scale, softcap, num_splits
    )
    return launch.forward(inputs)


def _run_append_forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    lengths: Tensor | None,
    leftpad: Tensor | None,
    table: Tensor | None,
    sinks: Tensor | None,
    max_q: int | None,
    at: int,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    num_splits: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    new = k.shape[1]
    _check_values(q, k_cache, cu_q, lengths, leftpad, table, sinks, max_q, at + new, new)
    if backend == "cpu":
        cpu.append(k_cache, v_cache, k, v, lengths, table, at)
        options = Options(causal, (left, right), scale, softcap, sinks)
        return cpu.forward(q, k_cache, v_cache, cu_q, lengths, leftpad, table, at + new, options)
    inputs = launch.make_inputs(
        q, k_cache, v_cache, cu_q, lengths, leftpad, table, sinks, at, causal, left, right, scale, softcap, num_splits
    )
    return launch.append_forward(inputs, k, v)


def _plan_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q, lengths, leftpad, table, sinks, _, *options, _ = arguments
    return launch.plan_forward(launch.make_inputs(q, k, v, cu_q, lengths, leftpad, table, sinks, *options))


def _plan_append_forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_q, lengths, leftpad, table, sinks, _, *options, _ = arguments
    inputs = launch.make_inputs(q, k_cache, v_cache, cu_q, lengths, leftpad, table, sinks, *options)
    return launch.plan_append_forward(inputs, k, v)


def _fake_forward(q: Tensor, _k: Tensor, v: Tensor, *_options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    return o, torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device=q.device)


_ENTRIES = "Tensor? cu_q, Tensor? lengths, Tensor? leftpad, Tensor? table, Tensor? sinks, SymInt? max_q"
_OPTIONS = (
    "SymInt added, bool causal, SymInt window_left, SymInt window_right, float scale, float softcap, SymInt"
    " num_splits, str backend"
)
flash_decode = register(
    f"flash_decode(Tensor q, Tensor k, Tensor v, {_ENTRIES}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _run_forward,
    _fake_forward,
    plan=_plan_forward,
)
flash_decode_append = register(
    "flash_decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v,"
    f" {_ENTRIES}, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _run_append_forward,
    _fake_forward,
    plan=_plan_append_forward,
)
