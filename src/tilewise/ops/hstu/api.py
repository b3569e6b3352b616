"""`hstu_attention`: checks, autograd, choice of backend."""

from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import HAS_TRITON, resolve_backend
from tilewise.ops._host.register import autocasting, register
from tilewise.ops.hstu import cpu, reference

if HAS_TRITON:
    from tilewise.ops.hstu import launch


@autocasting
def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    max_seq_len: int,
    alpha: float | None = None,
    causal: bool = True,
    num_targets: torch.Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of HSTU, `SiLU(alpha · q kᵀ) / max_seq_len · v` over what the mask keeps, without ever building the
    score matrix. No softmax.

    The mask counts by ids: a token's is its position; the contextual tokens at a sequence's start share one, and so do
    the targets at its end.

    Args:
        q: queries, packed `[N, H, D]`. fp16, bf16 or fp32; D from 1 to 256. The last axis must be contiguous, every
            other stride is free.
        k: keys `[N, H, D]`.
        v: values `[N, H, Dv]`; Dv may differ from D.
        seq_offsets: offsets `[B + 1]` of the sequences, int32 or int64, first 0, last N, never decreasing; a sequence
            may be empty.
        max_seq_len: the weights are divided by it; no sequence may be longer.
        alpha: any finite number, by default `D ** -0.5`.
        causal: a query sees itself and keys of a lower id; otherwise keys of any other id.
        num_targets: `[B]`, int32 or int64: how many tokens at each sequence's end are targets, which see what comes
            before them and themselves, not each other.
        max_attn_len: where > 0, only keys whose id is at most max_attn_len away.
        contextual_seq_len: how many tokens at each sequence's start are its context: each sees all keys but targets,
            whatever the limits.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.

    Returns:
        The output `[N, H, Dv]` in q's dtype.

    Values in seq_offsets and num_targets are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it
    costs a synchronisation).
    """
    given: tuple[Any, ...] = q, k, v, seq_offsets, num_targets
    options: tuple[Any, ...] = max_seq_len, alpha, causal, max_attn_len, contextual_seq_len, backend
    made: torch.Tensor | None = hstu_forward.call(given, options, _prepare)
    return _by_reference(*given, *options) if made is None else made


def _numbers(
    q: torch.Tensor, max_seq_len: int, alpha: float | None, max_attn_len: int, contextual_seq_len: int
) -> tuple[int, float, int, int]:
    """The longest sequence, alpha and both limits as they are computed with."""
    # Without a token there is nothing to divide. Limits beyond the longest sequence change nothing more: so no position
    # overflows.
    longest = max(max_seq_len, 1)
    return (
        longest,
        q.shape[-1] ** -0.5 if alpha is None else alpha,
        min(max_attn_len, longest),
        min(contextual_seq_len, longest + 1),
    )


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    alpha: float | None,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
    backend: str | None,
) -> tuple[Any, ...] | None:
    """The arguments of `hstu_forward`, checked; None where the reference is to compute."""
    backend = _check(q, k, v, offsets, num_targets, max_seq_len, max_attn_len, contextual_seq_len, backend)
    if alpha is not None:
        checks.check_number(alpha, "alpha")
    if backend == "reference":
        return None
    longest, factor, reach, context = _numbers(q, max_seq_len, alpha, max_attn_len, contextual_seq_len)
    offsets, num_targets = offsets.contiguous(), None if num_targets is None else num_targets.contiguous()
    return q, k, v, offsets, num_targets, longest, checks.as_float(factor), causal, reach, context, backend


def _by_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    alpha: float | None,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
    _backend: str | None,
) -> torch.Tensor:
    longest, factor, reach, context = _numbers(q, max_seq_len, alpha, max_attn_len, contextual_seq_len)
    _check_values(q, offsets, num_targets, longest)
    return reference.hstu_attention(
        q,
        k,
        v,
        offsets,
        max_seq_len=longest,
        alpha=factor,
        causal=causal,
        num_targets=num_targets,
        max_attn_len=reach,
        contextual_seq_len=context,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    max_attn_len: int,
    contextual_seq_len: int,
    backend: str | None,
) -> str:
    """All that can be said without a look at values; returns the backend to use."""
    checks.check_whole(max_seq_len, "max_seq_len", 0)
    checks.check_whole(max_attn_len, "max_attn_len", 0)
    checks.check_whole(contextual_seq_len, "contextual_seq_len", 0)
    tensors = {"q": q, "k": k, "v": v}
    checks.check_one_length(tensors, checks.check_attention_tensors(tensors, packed=True, offsets="seq_offsets"))
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    checks.check_offsets_tensor(seq_offsets, "seq_offsets", q.device, q.shape[0])
    if num_targets is not None:
        checks.check_indices_tensor(
            num_targets, "num_targets", q.device, (seq_offsets.shape[0] - 1,), "[B], a number for each sequence"
        )
    if max_seq_len == 0 and q.shape[0] > 0:
        raise ValueError(
            f"max_seq_len is 0 and there are {q.shape[0]} tokens: expected at least the length of the longest sequence"
        )
    return backend


def _check_values(q: torch.Tensor, offsets: torch.Tensor, num_targets: torch.Tensor | None, max_seq_len: int) -> None:
    checks.check_offset_values(offsets, "seq_offsets", q.shape[0], max_seq_len, "max_seq_len")
    if num_targets is not None:
        checks.check_target_values(num_targets, "num_targets", offsets)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    alpha: float,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
    backend: str,
) -> torch.Tensor:
    _check_values(q, offsets, num_targets, max_seq_len)
    if backend == "cpu":
        return cpu.forward(
            q, k, v, offsets, num_targets, cpu.Options(max_seq_len, alpha, causal, max_attn_len, contextual_seq_len)
        )
    return launch.forward(
        launch.make_inputs(q, k, v, offsets, num_targets, max_seq_len, alpha, causal, max_attn_len, contextual_seq_len)
    )


def _run_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    alpha: float,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if backend == "cpu":
        options = cpu.Options(max_seq_len, alpha, causal, max_attn_len, contextual_seq_len)
        # The forward runs with autocast off; a backward may be called inside it.
        with torch.autocast("cpu", enabled=False):
            return cpu.backward(q, k, v, do, offsets, num_targets, options)
    return launch.backward(
        launch.make_inputs(q, k, v, offsets, num_targets, max_seq_len, alpha, causal, max_attn_len, contextual_seq_len),
        do,
    )


def _plan_forward(*arguments: Any) -> torch.Tensor:
    return launch.plan_forward(launch.make_inputs(*arguments[:-1]))


def _plan_backward(do: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    return launch.plan_backward(launch.make_inputs(*arguments[:-1]), do)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any) -> torch.Tensor:
    return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)


def _fake_backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return (*hstu_backward.call_checked((do, *ctx.saved_tensors), ctx.options), *(None,) * (2 + len(ctx.options)))


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor? num_targets, SymInt max_seq_len, float alpha, bool causal,"
    " SymInt max_attn_len, SymInt contextual_seq_len, str backend"
)
hstu_backward = register(
    f"hstu_backward(Tensor do, {_INPUTS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _run_backward,
    _fake_backward,
    plan=_plan_backward,
)
hstu_forward = register(
    f"hstu_forward({_INPUTS}) -> Tensor", _run_forward, _fake_forward, _differentiate, _save, plan=_plan_forward
)
