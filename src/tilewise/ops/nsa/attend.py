"""`native_sparse_attend`: the call of the native-sparse-attention-pytorch package."""

from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.register import autocasting, register
from tilewise.ops._host.symbol import compute
from tilewise.ops.flash.api import flash_forward
from tilewise.ops.nsa import problem, reference
from tilewise.ops.nsa.branches import KERNELS, fake_outputs, nothing, without_autocast

Pair = tuple[torch.Tensor, torch.Tensor]

LAYOUT = "[B, H, T, D]"


@autocasting
def native_sparse_attend(
    fq: torch.Tensor,
    fk: torch.Tensor,
    fv: torch.Tensor,
    block_size: int,
    selected_block_indices: torch.Tensor,
    fmask: torch.Tensor,
    sel_scale: torch.Tensor | None = None,
    include_block_causal: bool = True,
    return_lse: bool = False,
    block_dk_dv_use_dot: bool | None = None,
    return_sliding_window_out: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor | Pair | tuple[Pair, Pair]:
    """Attention of each query to its own block up to itself, and to the selected blocks whole, each as often as it is
    named.

    Args:
        fq: queries `[B, Hq, T, D]`. fp16, bf16 or fp32; D from 1 to 256. The last axis must be contiguous, every other
            stride is free.
        fk: keys `[B, Hk, T, D]`. Hq must be a multiple of Hk: query head h reads KV head `h // (Hq // Hk)`.
        fv: values `[B, Hk, T, Dv]`; Dv may differ from D.
        block_size: tokens in a block; `triton` takes up to 128.
        selected_block_indices: int32 or int64 `[B, Hk, T, S]`, or `[B, Hq, T, S]` for each query head its own. A block
            takes part whole, also where it lies after the query; -1 is skipped; keys past T do not exist.
        fmask: bool, of the indices' shape; where it is False the index is not read.
        sel_scale: of the indices' shape, in fq's dtype or fp32: the scores of a selected block are multiplied by it.
            Differentiable.
        include_block_causal: whether the query's own block, up to the query, takes part besides.
        return_lse: also return the LSE.
        block_dk_dv_use_dot: accepted, and changes nothing.
        return_sliding_window_out: also return causal attention to the keys from `t - block_size` to t, block_size + 1
            of them.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.

    Returns:
        The output `[B, Hq, T, Dv]` in fq's dtype; with return_lse `(o, lse)`, the LSE fp32 `[B, Hq, T]` and
        differentiable; with return_sliding_window_out `(o, o_win)`; with both `((o, o_win), (lse, lse_win))`. The scale
        is `D ** -0.5`. A query that sees no key gives 0 and -inf, and gradients of 0.

    Values of indices are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    backend = _check(fq, fk, fv, block_size, selected_block_indices, fmask, sel_scale, backend)
    near: Pair | None = None
    if backend == "reference":
        _check_values(selected_block_indices, fmask, block_size, tokens_axis=2)
        o, lse, near = _by_reference(
            fq,
            fk,
            fv,
            block_size,
            selected_block_indices,
            fmask,
            sel_scale,
            include_block_causal,
            return_sliding_window_out,
        )
    else:
        q, k, v, indices, mask = (x.transpose(1, 2) for x in (fq, fk, fv, selected_block_indices, fmask))
        factor = None if sel_scale is None else sel_scale.transpose(1, 2)
        scale = fq.shape[-1] ** -0.5
        o, lse, _ = attend_forward.call_checked(
            (q, k, v, indices, mask, factor), (include_block_causal, block_size, scale, backend)
        )
        o = o.transpose(1, 2)
        if return_sliding_window_out:
            numbers = None, None, 0, True, block_size, 0, scale, 0.0, True, backend
            o_win, lse_win = flash_forward.call_checked((q, k, v, None, None, None), numbers)
            near = o_win.transpose(1, 2), lse_win
    if near is None:
        return (o, lse) if return_lse else o
    return ((o, near[0]), (lse, near[1])) if return_lse else (o, near[0])


def _by_reference(
    fq: torch.Tensor,
    fk: torch.Tensor,
    fv: torch.Tensor,
    block_size: int,
    indices: torch.Tensor,
    fmask: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    window: bool,
) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
    """Output, LSE, and those of the sliding window where it is wanted."""
    results: Any = reference.native_sparse_attend(fq, fk, fv, block_size, indices, fmask, sel_scale, own, window)
    if not window:
        return *results, None
    (o, o_win), (lse, lse_win) = results
    return o, lse, (o_win, lse_win)


def _check(
    fq: torch.Tensor,
    fk: torch.Tensor,
    fv: torch.Tensor,
    block_size: int,
    indices: torch.Tensor,
    fmask: torch.Tensor,
    sel_scale: torch.Tensor | None,
    backend: str | None,
) -> str:
    """All that can be said without a look at values; returns the backend to use."""
    checks.check_whole(block_size, "block_size", 1)
    tensors = {"fq": fq, "fk": fk, "fv": fv}
    checks.check_fit(tensors, checks.check_attention_tensors(tensors, False, layout=LAYOUT), False, heads_axis=1)
    problem.check_lengths(tensors, axis=2)
    backend = problem.check_backend(backend, fq, "fq", block_size)
    # Heads and blocks are free, the one within limits: the rest of the shape is expected.
    heads, slots = (
        (indices.shape[1], indices.shape[3])
        if isinstance(indices, torch.Tensor) and indices.dim() == 4
        else (fk.shape[1], 0)
    )
    heads = heads if heads == fq.shape[1] else fk.shape[1]
    shape = (fq.shape[0], heads, fq.shape[2], slots)
    checks.check_indices_tensor(indices, "selected_block_indices", fq.device, shape, "[B, Hk or Hq, T, S]", "fq")
    if not isinstance(fmask, torch.Tensor) or fmask.dtype != torch.bool:
        came = fmask.dtype if isinstance(fmask, torch.Tensor) else f"a {type(fmask).__name__}"
        raise TypeError(f"fmask is {came}: expected a torch.Tensor of bool, True where the index is read")
    checks.check_place(fmask, "fmask", fq.device, shape, "the indices' shape", "fq")
    if sel_scale is not None:
        checks.check_beside(sel_scale, "sel_scale", fq, shape, "the indices' shape", "fq")
    return backend


def _check_values(indices: torch.Tensor, fmask: torch.Tensor, block_size: int, tokens_axis: int) -> None:
    checks.check_index_values(indices, "selected_block_indices", -(-indices.shape[tokens_axis] // block_size), fmask)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE, and the indices as kernels read them: -1 where nothing is named."""
    _check_values(indices.transpose(1, 2), mask.transpose(1, 2), block_size, tokens_axis=2)
    return _plan_forward(q, k, v, indices, mask, sel_scale, own, block_size, scale, backend)


def _plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    mask: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    read = compute(_as_read, indices, mask, -(-q.shape[1] // block_size), shape=indices.shape, dtype=torch.int32)
    return *KERNELS[backend].attend_forward(q, k, v, read, sel_scale, own, block_size, scale), read


def _as_read(indices: torch.Tensor, mask: torch.Tensor, blocks: int) -> torch.Tensor:
    # An index that was not checked may be no block, and be one once it is cut to 32 bits.
    named = mask & (indices >= 0) & (indices < blocks)
    return indices.where(named, -1).to(torch.int32).contiguous()


def _run_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    own: bool,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    with without_autocast(backend):
        return _plan_backward(do, dlse, q, k, v, indices, sel_scale, o, lse, own, block_size, scale, backend)


def _plan_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    own: bool,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    gradients = KERNELS[backend].attend_backward(q, k, v, indices, sel_scale, o, lse, do, dlse, own, block_size, scale)
    dq, dk, dv, dsel = gradients
    return dq, dk, dv, nothing(q) if dsel is None else dsel


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return *fake_outputs(q, k, v), torch.empty(indices.shape, dtype=torch.int32, device=q.device)


def _fake_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    of_scale = q if sel_scale is None else sel_scale
    return *gradients, torch.empty(
        (0,) if sel_scale is None else sel_scale.shape, dtype=of_scale.dtype, device=q.device
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, _, _, sel_scale = inputs[:6]
    ctx.options = inputs[6:]
    o, lse, read = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, read, sel_scale, o, lse)


def _differentiate(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None, _: Any
) -> tuple[torch.Tensor | None, ...]:
    q, k, v, read, sel_scale, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, dsel = attend_backward.call_checked((do, dlse, q, k, v, read, sel_scale, o, lse), ctx.options)
    return dq, dk, dv, None, None, None if sel_scale is None else dsel, *(None,) * len(ctx.options)


_OPTIONS = "bool own, SymInt block_size, float scale, str backend"
attend_backward = register(
    "nsa_attend_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor indices, Tensor? sel_scale,"
    f" Tensor o, Tensor lse, {_OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsel_scale)",
    _run_backward,
    _fake_backward,
    plan=_plan_backward,
)
attend_forward = register(
    f"nsa_attend_forward(Tensor q, Tensor k, Tensor v, Tensor indices, Tensor mask, Tensor? sel_scale, {_OPTIONS})"
    " -> (Tensor o, Tensor lse, Tensor read)",
    _run_forward,
    _fake_forward,
    _differentiate,
    _save,
    plan=_plan_forward,
)
