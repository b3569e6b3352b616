"""The steps of native sparse attention on their own: `compressed_attention`, `select_blocks` and
`selected_attention`.
"""

from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.register import autocasting, register
from tilewise.ops.nsa import problem, reference
from tilewise.ops.nsa.branches import KERNELS, fake_gradients, fake_outputs, without_autocast
from tilewise.ops.nsa.problem import Sizes, given_windows


@autocasting
def compressed_attention(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    *,
    compress_size: int,
    compress_stride: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the compressed windows that have ended: window c is seen by query t where
    `c·stride + size - 1 <= t`.

    Args:
        q: queries `[B, T, Hq, D]`, or packed `[N, Hq, D]` with cu_seqlens. fp16, bf16 or fp32; D from 1 to 256. The
            last axis must be contiguous, every other stride is free.
        k_cmp: a key for each window, `[B, C, Hk, D]` with `C = max(0, (T - compress_size) // compress_stride + 1)`, or
            packed, those of all sequences end to end. Hq must be a multiple of Hk: query head h reads KV head
            `h // (Hq // Hk)`.
        v_cmp: a value for each window, `[B, C, Hk, Dv]` or packed; Dv may differ from D.
        compress_size, compress_stride: tokens in a window, and from one window's start to the next; the size is a
            multiple of the stride.
        scale: any finite number, by default `D ** -0.5`.
        cu_seqlens: offsets `[B + 1]` of packed sequences, int32 or int64, first 0, last N, never decreasing; a sequence
            may be empty.
        return_lse: also return the LSE.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.

    Returns:
        The output `[B, T, Hq, Dv]` (or `[N, Hq, Dv]`) in q's dtype. With return_lse also the natural logarithm of the
        sum of exponentials, fp32 `[B, Hq, T]` (or `[Hq, N]`), differentiable too. A query before the first window's end
        gives 0 and -inf, and gradients of 0.

    Values in offsets are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    problem.check_compression(compress_size, compress_stride)
    backend = problem.check_tensors({"q": q, "k_cmp": k_cmp, "v_cmp": v_cmp}, cu_seqlens, backend)
    problem.check_windows(q, k_cmp, cu_seqlens, compress_size, compress_stride)
    scale = problem.scale_of(q, scale)
    cu_seqlens = problem.contiguous(cu_seqlens)
    if backend == "reference":
        problem.check_packed_windows(q, k_cmp, cu_seqlens, None, None, compress_size, compress_stride)
        o, lse = reference.compressed_attention(
            q,
            k_cmp,
            v_cmp,
            compress_size=compress_size,
            compress_stride=compress_stride,
            scale=scale,
            cu_seqlens=cu_seqlens,
        )
    else:
        o, lse = compressed_forward.call_checked(
            (q, k_cmp, v_cmp, cu_seqlens, None, None), (compress_size, compress_stride, scale, backend)
        )
    return (o, lse) if return_lse else o


@autocasting
def select_blocks(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    *,
    compress_size: int,
    compress_stride: int,
    block_size: int,
    block_count: int,
    init_blocks: int = 1,
    local_blocks: int = 2,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The blocks that each query selects, by its attention to the compressed windows, which a block shares out by the
    tokens it has of them.

    Args:
        q, k_cmp, compress_size, compress_stride, scale, cu_seqlens, backend: as in compressed_attention.
        block_size: tokens in a block, a multiple of compress_stride.
        block_count: how many blocks are selected, fewer only where there are fewer.
        init_blocks, local_blocks: the first ones, and the query's own with those just before it, which are always
            selected; together at most
            block_count.

    Returns:
        int32 `[B, T, Hk, block_count]` (or `[N, Hk, block_count]`, counted from the sequence's own start): ascending,
        -1 at the end. The query heads of one KV head select together; blocks after the query's own never; of equal
        scores the lower index. Passes no gradient.

    Values in offsets are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    sizes = Sizes(compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks)
    problem.check_sizes(sizes)
    backend = problem.check_tensors({"q": q, "k_cmp": k_cmp}, cu_seqlens, backend)
    problem.check_windows(q, k_cmp, cu_seqlens, compress_size, compress_stride)
    scale = problem.scale_of(q, scale)
    cu_seqlens = problem.contiguous(cu_seqlens)
    if backend == "reference":
        problem.check_packed_windows(q, k_cmp, cu_seqlens, None, None, compress_size, compress_stride)
        return reference.select_blocks(q, k_cmp, **sizes._asdict(), scale=scale, cu_seqlens=cu_seqlens)
    return select.call_checked((q.detach(), k_cmp.detach(), cu_seqlens, None, None), (*sizes, scale, backend))


@autocasting
def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each query to the keys of the blocks it is given, each key once.

    Args:
        q: queries `[B, T, Hq, D]`, or packed `[N, Hq, D]` with cu_seqlens. fp16, bf16 or fp32; D from 1 to 256. The
            last axis must be contiguous, every other stride is free.
        k: keys `[B, T, Hk, D]` or `[N, Hk, D]`. Hq must be a multiple of Hk: query head h reads KV head
            `h // (Hq // Hk)`.
        v: values `[B, T, Hk, Dv]` or `[N, Hk, Dv]`; Dv may differ from D.
        block_indices: int32 or int64 `[B, T, Hk, S]` or `[N, Hk, S]`, counted from the sequence's own start, in any
            order: block j holds the keys from `j · block_size` on. A repeated index counts once, -1 is skipped, and
            keys after the query take no part.
        block_size: tokens in a block; `triton` takes up to 128.
        scale, cu_seqlens, return_lse, backend: as in compressed_attention.

    Returns:
        The output `[B, T, Hq, Dv]` (or `[N, Hq, Dv]`) in q's dtype. With return_lse also the natural logarithm of the
        sum of exponentials, fp32 `[B, Hq, T]` (or `[Hq, N]`), differentiable too. A query that sees no key gives 0 and
        -inf, and gradients of 0.

    Values in offsets and indices are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    checks.check_whole(block_size, "block_size", 1)
    tensors = {"q": q, "k": k, "v": v}
    backend = problem.check_tensors(tensors, cu_seqlens, backend, block_size)
    problem.check_lengths(tensors)
    slots = block_indices.shape[-1] if isinstance(block_indices, torch.Tensor) and block_indices.dim() else 0
    axes = "[B, T, Hk, S]" if cu_seqlens is None else "[N, Hk, S]"
    checks.check_indices_tensor(block_indices, "block_indices", q.device, (*q.shape[:-2], k.shape[-2], slots), axes)
    scale = problem.scale_of(q, scale)
    cu_seqlens, block_indices = problem.contiguous(cu_seqlens), block_indices.contiguous()
    if backend == "reference":
        problem.check_selection(q, k, block_indices, cu_seqlens, None, None, block_size)
        o, lse = reference.selected_attention(
            q, k, v, block_indices, block_size=block_size, scale=scale, cu_seqlens=cu_seqlens
        )
    else:
        o, lse = selected_forward.call_checked(
            (q, k, v, block_indices, cu_seqlens, None, None), (block_size, scale, backend)
        )
    return (o, lse) if return_lse else o


def _run_compressed_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k_cmp, _, cu, cu_k, first, size, stride = arguments[:8]
    problem.check_packed_windows(q, k_cmp, cu, cu_k, first, size, stride)
    return _plan_compressed_forward(*arguments)


def _plan_compressed_forward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    windows = given_windows(cu if cu_k is None else cu_k, k_cmp.shape[-3], size, stride)
    return KERNELS[backend].compressed_forward(q, k_cmp, v_cmp, cu, windows, size, stride, scale, first)


def _run_compressed_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    with without_autocast(arguments[-1]):
        return _plan_compressed_backward(*arguments)


def _plan_compressed_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    windows = given_windows(cu if cu_k is None else cu_k, k_cmp.shape[-3], size, stride)
    return KERNELS[backend].compressed_backward(
        q, k_cmp, v_cmp, o, lse, do, dlse, cu, windows, size, stride, scale, first
    )


def _run_select(*arguments: Any) -> torch.Tensor:
    problem.check_packed_windows(*arguments[:7])
    return _plan_select(*arguments)


def _plan_select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    size: int,
    stride: int,
    block_size: int,
    block_count: int,
    init_blocks: int,
    local_blocks: int,
    scale: float,
    backend: str,
) -> torch.Tensor:
    windows = given_windows(cu if cu_k is None else cu_k, k_cmp.shape[-3], size, stride)
    # The keys stand in for the values: only the LSE is wanted.
    _, lse = KERNELS[backend].compressed_forward(q, k_cmp, k_cmp, cu, windows, size, stride, scale, first)
    sizes = Sizes(size, stride, block_size, block_count, init_blocks, local_blocks)
    return KERNELS[backend].choose(q, k_cmp, lse, cu, windows, sizes, scale, first)


def _run_selected_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _, indices, cu, cu_k, first, block_size = arguments[:8]
    problem.check_selection(q, k, indices, cu, cu_k, first, block_size)
    return _plan_selected_forward(*arguments)


def _plan_selected_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return KERNELS[backend].selected_forward(q, k, v, indices, cu, block_size, scale, cu_k, first)


def _run_selected_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    with without_autocast(arguments[-1]):
        return _plan_selected_backward(*arguments)


def _plan_selected_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    block_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    return KERNELS[backend].selected_backward(q, k, v, indices, o, lse, do, dlse, cu, block_size, scale, cu_k, first)


def _fake_select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    first: torch.Tensor | None,
    size: int,
    stride: int,
    block_size: int,
    block_count: int,
    *_: Any,
) -> Any:
    return torch.empty(*q.shape[:-2], k_cmp.shape[-2], block_count, dtype=torch.int32, device=q.device)


def _save_compressed(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])


def _differentiate_compressed(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    do = torch.zeros_like(ctx.saved_tensors[3]) if do is None else do
    gradients = compressed_backward.call_checked((do, dlse, *ctx.saved_tensors), ctx.options)
    return *gradients, *(None,) * (3 + len(ctx.options))


def _save_selected(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.options = inputs[7:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4], *output, *inputs[4:7])


def _differentiate_selected(
    ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    do = torch.zeros_like(ctx.saved_tensors[4]) if do is None else do
    gradients = selected_backward.call_checked((do, dlse, *ctx.saved_tensors), ctx.options)
    return *gradients, *(None,) * (4 + len(ctx.options))


_INCOMING = "Tensor do, Tensor? dlse"
# Where sequences begin: the queries', the keys' where those are others (they hold their sequences whole), and the
# position of each sequence's first query, where queries are a part of their sequences; all int32.
_PLACE = "Tensor? cu, Tensor? cu_k, Tensor? first"
_WINDOWS = "SymInt compress_size, SymInt compress_stride"
compressed_backward = register(
    f"nsa_compressed_backward({_INCOMING}, Tensor q, Tensor k_cmp, Tensor v_cmp, Tensor o, Tensor lse, {_PLACE},"
    f" {_WINDOWS}, float scale, str backend) -> (Tensor dq, Tensor dk_cmp, Tensor dv_cmp)",
    _run_compressed_backward,
    fake_gradients,
    plan=_plan_compressed_backward,
)
compressed_forward = register(
    f"nsa_compressed_forward(Tensor q, Tensor k_cmp, Tensor v_cmp, {_PLACE}, {_WINDOWS}, float scale, str backend) ->"
    " (Tensor o, Tensor lse)",
    _run_compressed_forward,
    fake_outputs,
    _differentiate_compressed,
    _save_compressed,
    plan=_plan_compressed_forward,
)
select = register(
    f"nsa_select(Tensor q, Tensor k_cmp, {_PLACE}, {_WINDOWS}, SymInt block_size, SymInt block_count, SymInt"
    " init_blocks, SymInt local_blocks, float scale, str backend) -> Tensor block_indices",
    _run_select,
    _fake_select,
    plan=_plan_select,
)
selected_backward = register(
    f"nsa_selected_backward({_INCOMING}, Tensor q, Tensor k, Tensor v, Tensor indices, Tensor o, Tensor lse, {_PLACE},"
    " SymInt block_size, float scale, str backend) -> (Tensor dq, Tensor dk, Tensor dv)",
    _run_selected_backward,
    fake_gradients,
    plan=_plan_selected_backward,
)
selected_forward = register(
    f"nsa_selected_forward(Tensor q, Tensor k, Tensor v, Tensor indices, {_PLACE}, SymInt block_size, float scale, str"
    " backend) -> (Tensor o, Tensor lse)",
    _run_selected_forward,
    fake_outputs,
    _differentiate_selected,
    _save_selected,
    plan=_plan_selected_forward,
)
