"""`flash_attention`: checks, autograd, choice of backend."""

from typing import TYPE_CHECKING, Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import HAS_TRITON, resolve_backend
from tilewise.ops._host.register import autocasting, register
from tilewise.ops.flash import cpu, reference
from tilewise.ops.flash.decode.api import attend_cached

if HAS_TRITON:
    from tilewise.ops.flash import launch
if TYPE_CHECKING:
    from tilewise.parallel import ContextPlan


@autocasting
def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sinks: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    deterministic: bool = True,
    backend: str | None = None,
    parallel: "ContextPlan | None" = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, `softmax(scale · q kᵀ) v`, without ever building the score matrix.

    Args:
        q: queries `[B, Tq, Hq, D]`, or packed `[Nq, Hq, D]` with cu_seqlens_q. fp16, bf16 or fp32; D from 1 to 256. The
            last axis must be contiguous, every other stride is free.
        k: keys `[B, Tk, Hk, D]` or `[Nk, Hk, D]`. Hq must be a multiple of Hk: query head h reads KV head
            `h // (Hq // Hk)`.
        v: values `[B, Tk, Hk, Dv]` or `[Nk, Hk, Dv]`; Dv may differ from D.
        causal: query i sees keys `j <= i + Tk - Tq` (aligned at the bottom right).
        window_size: (left, right): query i sees keys from `i + Tk - Tq - left` to `i + Tk - Tq + right`; -1 means no
            limit.
        scale: any finite number, by default `D ** -0.5`.
        softcap: where > 0, scores become `softcap · tanh(score / softcap)` before the mask.
        cu_seqlens_q: offsets `[B + 1]` of packed sequences, int32 or int64, first 0, last Nq, never decreasing; a
            sequence may be empty.
        cu_seqlens_k: the same for keys, by default cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: accepted as other packages want them; the kernels need neither. Checked where values
            are checked.
        sinks: one more score for each query head, `[Hq]`, fp16, bf16 or fp32: it takes part in every row's softmax and
            in the LSE, and has no value. It is neither scaled nor capped nor masked; -inf means none. Differentiable.
        seqused_k: of k and v `[B, T_max, Hk, ·]` the first seqused_k[b] exist, int32 or int64 `[B]`; alignment is at
            that length. q may be packed by cu_seqlens_q. It, leftpad_k and page_table are for inference: they raise
            where grad mode is on and a tensor requires grad.
        leftpad_k: int32 or int64 `[B]`: the first leftpad_k[b] keys do not exist either. Not with page_table.
        page_table: int32 or int64 `[B, P]`: k and v are pools `[pages, page_size, Hk, ·]`, page_size a multiple of 16;
            key j of entry b is row `j % page_size` of page `page_table[b, j // page_size]`. Wants seqused_k.
        num_splits: into how many parts each entry's keys are split, to be computed at once; their results are merged in
            order. 0 chooses, where seqused_k, leftpad_k or page_table are given, by the entry's own numbers; 1 never
            splits.
        return_lse: also return the LSE.
        deterministic: the same inputs give the same bits; False allows a backward to give that up for speed, where one
            gains by it, unless torch.use_deterministic_algorithms(True) is in force when the forward is called.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.
        parallel: a `tilewise.parallel.ContextPlan`: q, k and v are this rank's tokens of sequences that several
            processes share, `[B, T_local, H, ·]` or packed `[N_local, H, ·]`, and so are the results. Offsets are the
            plan's. The gradient of sinks is this rank's part.

    Returns:
        The output `[B, Tq, Hq, Dv]` (or `[Nq, Hq, Dv]`) in q's dtype. With return_lse also the natural logarithm of the
        sum of exponentials, fp32 `[B, Hq, Tq]` (or `[Hq, Nq]`), differentiable too. A row that sees no key gives 0 and
        -inf, and gradients of 0; with a sink its LSE is the sink.

    Values in offsets, lengths, pages and sinks are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1
    (it costs a synchronisation).
    """
    if not deterministic:
        # Decided here, at the forward, and part of what a remembered problem is found by.
        deterministic = torch.are_deterministic_algorithms_enabled()
    if parallel is not None:
        checks.check_none_given(
            "parallel",
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            page_table=page_table,
            num_splits=num_splits or None,
        )
        both = parallel.flash_attention(
            q,
            k,
            v,
            causal=causal,
            window_size=window_size,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            deterministic=deterministic,
            backend=backend,
        )
        return both if return_lse else both[0]
    if seqused_k is not None or leftpad_k is not None or page_table is not None:
        if cu_seqlens_k is not None:
            raise ValueError(
                "cu_seqlens_k is given with seqused_k, leftpad_k or page_table: their keys are not packed; leave it out"
            )
        return attend_cached(
            (q, k, v, cu_seqlens_q, seqused_k, leftpad_k, page_table, sinks),
            (max_seqlen_q, causal, window_size, scale, softcap, num_splits, backend),
            return_lse,
        )
    given: tuple[Any, ...] = q, k, v, cu_seqlens_q, cu_seqlens_k, sinks
    lengths = max_seqlen_q, max_seqlen_k
    options: tuple[Any, ...] = *lengths, num_splits, causal, window_size, scale, softcap, deterministic, backend
    made = flash_forward.call(given, options, _prepare)
    o, lse = _by_reference(*given, *options) if made is None else made
    return (o, lse) if return_lse else o


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    num_splits: int,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    deterministic: bool,
    backend: str | None,
) -> tuple[Any, ...] | None:
    """The arguments of `flash_forward`, checked; None where the reference is to compute."""
    backend = _check(q, k, v, window_size, softcap, cu_q, cu_k, sinks, max_q, max_k, backend)
    checks.check_whole(num_splits, "num_splits", 0)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        checks.check_number(scale, "scale")
    if backend == "reference":
        return None
    left, right = window_size
    if cu_q is not None:
        cu_q = cu_q.contiguous()
        cu_k = cu_q if cu_k is None else cu_k.contiguous()
    return (
        q,
        k,
        v,
        cu_q,
        cu_k,
        None if sinks is None else sinks.contiguous(),
        max_q,
        max_k,
        num_splits,
        causal,
        left,
        right,
        checks.as_float(scale),
        checks.as_float(softcap),
        deterministic,
        backend,
    )


def _by_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    _splits: int,
    causal: bool,
    window_size: tuple[int, int],
    scale: float | None,
    softcap: float,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    cu_k = cu_q if cu_k is None else cu_k
    _check_values(q, k, cu_q, cu_k, sinks, max_q, max_k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window_size
    return reference.flash_attention(
        q,
        k,
        v,
        causal=causal,
        window_size=(left, right),
        scale=scale,
        softcap=softcap,
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        sinks=sinks,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window_size: tuple[int, int],
    softcap: float,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    backend: str | None,
) -> str:
    """All that can be said without a look at values; returns the backend to use."""
    checks.check_window(window_size)
    checks.check_number(softcap, "softcap", minimum=0.0)
    if max_seqlen_q is not None:
        checks.check_number(max_seqlen_q, "max_seqlen_q", minimum=0)
    if max_seqlen_k is not None:
        checks.check_number(max_seqlen_k, "max_seqlen_k", minimum=0)
    packed = cu_seqlens_q is not None
    checks.check_qkv(q, k, v, packed)
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    if sinks is not None:
        checks.check_sinks(sinks, q, backend)
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise ValueError(
            "cu_seqlens_k is given without cu_seqlens_q: give both, or neither for dense [B, T, H, D] tensors"
        )
    if cu_seqlens_q is not None:
        checks.check_offsets_tensor(cu_seqlens_q, "cu_seqlens_q", q.device, q.shape[0])
        if cu_seqlens_k is not None:
            checks.check_offsets_tensor(
                cu_seqlens_k, "cu_seqlens_k", q.device, k.shape[0], batch=cu_seqlens_q.shape[0] - 1
            )
        elif k.shape[0] != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} tokens and k has {k.shape[0]}: give cu_seqlens_k where they differ")
    return backend


def _check_values(
    q: torch.Tensor,
    k: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
) -> None:
    if cu_q is not None and cu_k is not None:
        checks.check_offset_values(cu_q, "cu_seqlens_q", q.shape[0], max_q, "max_seqlen_q")
        checks.check_offset_values(cu_k, "cu_seqlens_k", k.shape[0], max_k, "max_seqlen_k")
    if sinks is not None:
        checks.check_sink_values(sinks)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    num_splits: int,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_values(q, k, cu_q, cu_k, sinks, max_q, max_k)
    if backend == "cpu":
        return cpu.forward(q, k, v, cu_q, cu_k, cpu.Options(causal, (left, right), scale, softcap, sinks))
    inputs = launch.make_inputs(q, k, v, cu_q, cu_k, causal, left, right, scale, softcap, sinks, num_splits)
    return launch.forward(inputs)


def _plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_q: int | None,
    max_k: int | None,
    num_splits: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = launch.make_inputs(q, k, v, cu_q, cu_k, *options[:5])
    return launch.plan_forward(inputs._replace(sinks=sinks, num_splits=num_splits))


def _plan_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    inputs = launch.make_inputs(q, k, v, cu_q, cu_k, *options[:5])._replace(sinks=sinks)
    return _four(q, launch.plan_backward(inputs, o, lse, do, dlse, deterministic=options[5]))


def _four(q: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As the schema has them: an empty one of sinks where there are none."""
    return gradients if len(gradients) == 4 else (*gradients, q.new_empty((0,)))


def _run_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    deterministic: bool,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    if backend == "cpu":
        # The forward runs with autocast off; a backward may be called inside it.
        with torch.autocast("cpu", enabled=False):
            options = cpu.Options(causal, (left, right), scale, softcap, sinks)
            return _four(q, cpu.backward(q, k, v, o, lse, do, dlse, cu_q, cu_k, options))
    inputs = launch.make_inputs(q, k, v, cu_q, cu_k, causal, left, right, scale, softcap, sinks)
    return _four(q, launch.backward(inputs, o, lse, do, dlse, None, None, (None, None), deterministic))


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    return o, torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device=q.device)


def _fake_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *_options: Any,
) -> tuple[torch.Tensor, ...]:
    given = (q, k, v) if sinks is None else (q, k, v, sinks)
    return _four(q, tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_q, cu_k, sinks = inputs[:6]
    # Neither the lengths, which a backward need not check again, nor splits, which it does not have.
    ctx.options = inputs[9:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, sinks)


def _differentiate(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, o, lse, cu_q, cu_k, sinks = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(o)
    dq, dk, dv, dsinks = flash_backward.call_checked((do, dlse, q, k, v, o, lse, cu_q, cu_k, sinks), ctx.options)
    return dq, dk, dv, None, None, None if sinks is None else dsinks, *(None,) * (3 + len(ctx.options))


_OPTIONS = (
    "bool causal, SymInt window_left, SymInt window_right, float scale, float softcap, bool deterministic, str backend"
)
flash_backward = register(
    "flash_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? cu_q, Tensor?"
    f" cu_k, Tensor? sinks, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _run_backward,
    _fake_backward,
    plan=_plan_backward,
)
flash_forward = register(
    "flash_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_q, Tensor? cu_k, Tensor? sinks, SymInt? max_q, SymInt?"
    f" max_k, SymInt num_splits, {_OPTIONS}) -> (Tensor o, Tensor lse)",
    _run_forward,
    _fake_forward,
    _differentiate,
    _save,
    plan=_plan_forward,
)
