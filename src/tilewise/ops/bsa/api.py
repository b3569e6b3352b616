"""`block_sparse_attn`: checks, autograd, choice of backend. `hstu_attention_with_bsa` comes from `hstu_bsa`."""

from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import HAS_TRITON, resolve_backend
from tilewise.ops._host.register import autocasting, register
from tilewise.ops.bsa import cpu, reference
from tilewise.ops.bsa.configs import Options, branch_dtype
from tilewise.ops.nsa.branches import nothing, without_autocast

if HAS_TRITON:
    from tilewise.ops.bsa import launch

GATES = ("g_cmp", "g_slc", "g_swa")
FORWARD: dict[str, Any] = {"cpu": cpu.forward} | ({"triton": launch.forward} if HAS_TRITON else {})
BACKWARD: dict[str, Any] = {"cpu": cpu.backward} | ({"triton": launch.backward} if HAS_TRITON else {})


@autocasting
def block_sparse_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int = 0,
    *,
    scale: float | None = None,
    interleave: bool = True,
    seq_offsets: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block-sparse attention for HSTU, causal: `u · (LN(g_cmp · o_cmp) + LN(g_slc · o_slc) [+ LN(g_swa · o_swa)])`.

    Keys are weighted by `A(q·k) = SiLU(scale · q·k) / scale`, with no softmax. o_cmp is the sum over the means of whole
    blocks, o_slc that over the keys of the blocks which those weights choose, o_swa that over the last window_size
    keys. LN is layer norm over the heads and channels of a token together, eps 1e-6, no weights.

    Args:
        q: queries `[B, T, H, D]`, or packed `[N, H, D]` with seq_offsets. fp16, bf16 or fp32; D from 1 to 256. The last
            axis must be contiguous, every other stride is free.
        k: keys, of q's shape.
        v: values `[B, T, H, Dv]` or `[N, H, Dv]`; Dv may differ from D.
        u: what the sum is multiplied by, of v's shape, in q's dtype or fp32.
        g_cmp, g_slc, g_swa: gates `[B, T, H]` or `[N, H]`, in q's dtype or fp32; None is a gate of 1.
        block_counts: how many blocks each query attends, its own included, which is always chosen.
        block_size: tokens in a block.
        window_size: keys of the sliding window, the query's own included; 0 leaves this branch, and g_swa, out.
        scale: any finite number above 0, by default `D ** -0.5`.
        interleave: head 2i + 1 takes head 2i's blocks, which needs an even number of heads; otherwise each head chooses
            for itself.
        seq_offsets: offsets `[B + 1]` of packed sequences, int32 or int64, first 0, last N, never decreasing; a
            sequence may be empty.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.

    Returns:
        The output, of v's shape and in q's dtype; and the blocks, int32 `[B, H, T, S]` with
        `S = min(block_counts, ceil(T / block_size))`, or packed `[H, N, block_counts]`, counted from the sequence's own
        start: ascending, -1 at the end. The choice passes no gradient.

    Values in seq_offsets are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    given = q, k, v, u, g_cmp, g_slc, g_swa, seq_offsets
    options = block_counts, block_size, window_size, scale, interleave, backend
    made = bsa_forward.call(given, options, _prepare)
    if made is None:
        return _by_reference(*given, *options)
    o, block_indices, *_ = made
    return o, block_indices


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    offsets: torch.Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int,
    scale: float | None,
    interleave: bool,
    backend: str | None,
) -> tuple[Any, ...] | None:
    """The arguments of `bsa_forward`, checked; None where the reference is to compute."""
    checks.check_whole(block_counts, "block_counts", 1)
    checks.check_whole(block_size, "block_size", 1)
    checks.check_whole(window_size, "window_size", 0)
    backend = _check_tensors(q, k, v, u, (g_cmp, g_slc, g_swa), offsets, backend)
    if interleave and q.shape[-2] % 2 != 0:
        raise ValueError(
            f"interleave is True and q has {q.shape[-2]} heads: head 2i + 1 takes head 2i's blocks; give an even"
            " number, or interleave=False"
        )
    scale = _scale_of(q, scale)
    if backend == "reference":
        return None
    # Without its branch a gate takes no part, whatever it holds.
    g_swa = g_swa if window_size > 0 else None
    offsets = None if offsets is None else offsets.contiguous()
    return (
        q,
        k,
        v,
        u,
        g_cmp,
        g_slc,
        g_swa,
        offsets,
        block_counts,
        block_size,
        window_size,
        scale,
        bool(interleave),
        backend,
    )


def _by_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    offsets: torch.Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int,
    scale: float | None,
    interleave: bool,
    _backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_values(q, offsets)
    named: dict[str, Any] = {"scale": _scale_of(q, scale), "interleave": interleave, "seq_offsets": offsets}
    g_swa = g_swa if window_size > 0 else None
    return reference.block_sparse_attn(q, k, v, u, g_cmp, g_slc, g_swa, block_counts, block_size, window_size, **named)


def _check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    seq_offsets: torch.Tensor | None,
    backend: str | None,
) -> str:
    """All that can be said of them without a look at values; returns the backend to use."""
    packed = seq_offsets is not None
    tensors = {"q": q, "k": k, "v": v}
    checks.check_one_length(tensors, checks.check_attention_tensors(tensors, packed, offsets="seq_offsets"))
    checks.check_beside(u, "u", q, v.shape, "v's shape")
    checks.check_last_axis(u, "u")
    for name, gate in zip(GATES, gates, strict=True):
        if gate is not None:
            checks.check_beside(gate, name, q, q.shape[:-1], "[N, H]" if packed else "[B, T, H]")
    if seq_offsets is not None:
        checks.check_offsets_tensor(seq_offsets, "seq_offsets", q.device, q.shape[0])
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    return backend


def _scale_of(q: torch.Tensor, scale: float | None) -> float:
    if scale is None:
        return q.shape[-1] ** -0.5
    checks.check_number(scale, "scale")
    if scale <= 0:
        raise ValueError(f"scale is {scale}: expected a number above 0, for scores are divided by it after SiLU")
    return checks.as_float(scale)


def _check_values(q: torch.Tensor, offsets: torch.Tensor | None) -> None:
    if offsets is not None:
        checks.check_offset_values(offsets, "seq_offsets", q.shape[0])


def _options(numbers: tuple[Any, ...], tokens: int) -> tuple[Options, str]:
    """From the schema's last arguments.

    A window longer than the sequence changes nothing more: so no position overflows.
    """
    block_counts, block_size, window_size, scale, interleave, backend = numbers
    window_size = min(window_size, max(tokens, 1))
    return Options(block_counts, block_size, window_size, scale, interleave), backend


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    cu: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, ...]:
    _check_values(q, cu)
    options, backend = _options(numbers, q.shape[-3])
    return tuple(FORWARD[backend](q, k, v, u, (g_cmp, g_slc, g_swa), cu, options))


def _plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    cu: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, ...]:
    options, _ = _options(numbers, q.shape[-3])
    return tuple(launch.plan_forward(q, k, v, u, (g_cmp, g_slc, g_swa), cu, options))


def _plan_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    *saved: Any,
) -> tuple[torch.Tensor, ...]:
    options, _ = _options(saved[7:], q.shape[-3])
    plan: Any = launch.plan_backward
    gradients = plan(do, q, k, v, u, (g_cmp, g_slc, g_swa), *saved[:7], options)
    return tuple(nothing(q) if gradient is None else gradient for gradient in gradients)


def _run_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    *saved: Any,
) -> tuple[torch.Tensor, ...]:
    options, backend = _options(saved[7:], q.shape[-3])
    with without_autocast(backend):
        gradients = BACKWARD[backend](do, q, k, v, u, (g_cmp, g_slc, g_swa), *saved[:7], options)
    return tuple(nothing(q) if gradient is None else gradient for gradient in gradients)


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    cu, block_counts, block_size, window_size = others[4:8]
    batch, tokens, heads = q.shape[:-3], q.shape[-3], q.shape[-2]
    slots = min(block_counts, -(-tokens // block_size)) if cu is None else block_counts

    def empty(*shape: int, dtype: torch.dtype = q.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=q.device)

    chosen = empty(*batch, heads, tokens, slots, dtype=torch.int32)
    means = (empty(*batch, tokens // block_size, heads, x.shape[-1]) for x in (k, v))
    kept = branch_dtype(q.dtype)
    return (
        empty(*v.shape),
        chosen,
        *means,
        empty(*v.shape, dtype=kept),
        empty(*v.shape, dtype=kept),
        empty(*(v.shape if window_size > 0 else (0,)), dtype=kept),
    )


def _fake_backward(do: torch.Tensor, q: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
    return tuple(
        nothing(q) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, *others[:6])
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, cu = inputs[:8]
    ctx.numbers = inputs[8:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:], cu)


def _differentiate(ctx: Any, do: torch.Tensor | None, *_others: Any) -> tuple[torch.Tensor | None, ...]:
    # Once: a checkpoint gives each saved tensor out a single time.
    saved = ctx.saved_tensors
    q, _, v, *_ = saved
    if do is None:
        do = torch.zeros(v.shape, dtype=q.dtype, device=q.device)
    gradients = bsa_backward.call_checked((do, *saved), ctx.numbers)
    wanted = (None if x is None else gradient for x, gradient in zip(saved[:7], gradients, strict=True))
    return *wanted, *(None,) * (1 + len(ctx.numbers))


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor u, Tensor? g_cmp, Tensor? g_slc, Tensor? g_swa"
_NUMBERS = "SymInt block_counts, SymInt block_size, SymInt window_size, float scale, bool interleave, str backend"
_MADE = "Tensor block_indices, Tensor k_cmp, Tensor v_cmp, Tensor o_cmp, Tensor o_slc, Tensor o_swa"
bsa_backward = register(
    f"bsa_backward(Tensor do, {_INPUTS}, {_MADE}, Tensor? cu, {_NUMBERS})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor du, Tensor dg_cmp, Tensor dg_slc, Tensor dg_swa)",
    _run_backward,
    _fake_backward,
    plan=_plan_backward,
)
bsa_forward = register(
    f"bsa_forward({_INPUTS}, Tensor? cu, {_NUMBERS}) -> (Tensor o, {_MADE})",
    _run_forward,
    _fake_forward,
    _differentiate,
    _save,
    plan=_plan_forward,
)
