"""`native_sparse_attention`: checks, autograd, choice of backend. Its steps on their own come from `steps`."""

from typing import TYPE_CHECKING, Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.register import autocasting, register
from tilewise.ops.nsa import branches, problem, reference
from tilewise.ops.nsa.problem import Sizes, contiguous, scale_of, window_count
from tilewise.ops.nsa.steps import compressed_attention, select_blocks, selected_attention

if TYPE_CHECKING:
    from tilewise.parallel import ContextPlan

__all__ = ["compressed_attention", "native_sparse_attention", "select_blocks", "selected_attention"]

GATES = ("g_cmp", "g_slc", "g_swa")


@autocasting
def native_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    block_count: int = 16,
    window_size: int = 512,
    init_blocks: int = 1,
    local_blocks: int = 2,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    return_indices: bool = False,
    backend: str | None = None,
    parallel: "ContextPlan | None" = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Native sparse attention (arXiv 2502.11089), causal: `g_cmp · o_cmp + g_slc · o_slc + g_swa · o_swa`.

    o_cmp is attention to compressed windows of keys, o_slc to the blocks that those scores select, o_swa to the last
    window_size keys.

    Args:
        q: queries `[B, T, Hq, D]`, or packed `[N, Hq, D]` with cu_seqlens. fp16, bf16 or fp32; D from 1 to 256. The
            last axis must be contiguous, every other stride is free.
        k: keys `[B, T, Hk, D]` or `[N, Hk, D]`. Hq must be a multiple of Hk: query head h reads KV head
            `h // (Hq // Hk)`.
        v: values `[B, T, Hk, Dv]` or `[N, Hk, Dv]`; Dv may differ from D.
        g_cmp, g_slc, g_swa: gates `[B, T, Hq]` or `[N, Hq]`, in q's dtype or fp32; None leaves the branch out. At least
            one must be given.
        k_cmp, v_cmp: learned compressed keys and values, both or neither: `[B, C, Hk, D]` and `[B, C, Hk, Dv]` with
            `C = max(0, (T - compress_size) // compress_stride + 1)`, or packed, those of all sequences end to end. By
            default the windows' means.
        compress_size, compress_stride: tokens in a window, and from one window's start to the next; the size is a
            multiple of the stride.
        block_size: tokens in a block that can be selected, a multiple of compress_stride; `triton` takes up to 128.
        block_count: how many blocks each query selects.
        window_size: keys of the sliding window, the query's own included.
        init_blocks, local_blocks: the first ones, and the query's own with those just before it, which are always
            selected; together at most
            block_count.
        scale: any finite number, by default `D ** -0.5`.
        cu_seqlens: offsets `[B + 1]` of packed sequences, int32 or int64, first 0, last N, never decreasing; a sequence
            may be empty.
        block_indices: blocks to attend in place of a choice, int32 or int64 `[B, T, Hk, block_count]` or
            `[N, Hk, block_count]`, counted from the sequence's own start; a repeated index counts once, -1 is skipped.
        return_indices: also return the selected blocks, which needs g_slc.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. Runs or
            raises, never falls back.
        parallel: a `tilewise.parallel.ContextPlan`: q, k, v, gates and block_indices are this rank's tokens of
            sequences that several processes share, `[B, T_local, H, ·]` or packed `[N_local, H, ·]`, and so are the
            results; blocks are numbered from the whole sequence's start. Offsets are the plan's. k_cmp and v_cmp are
            those of all windows, on every rank, and their gradients are this rank's part; `plan.windows` makes them.

    Returns:
        The output `[B, T, Hq, Dv]` (or `[N, Hq, Dv]`) in q's dtype. With return_indices also the blocks, int32
        `[B, T, Hk, block_count]` (or `[N, Hk, block_count]`): ascending, -1 at the end; given ones as they were given.
        The choice passes no gradient.

    Values in offsets and indices are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a
    synchronisation).
    """
    sizes = Sizes(compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks)
    o: torch.Tensor
    chosen: torch.Tensor | None
    if parallel is not None:
        checks.check_none_given("parallel", cu_seqlens=cu_seqlens)
        o, chosen = parallel.native_sparse_attention(
            q,
            k,
            v,
            gates=(g_cmp, g_slc, g_swa),
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            sizes=sizes,
            window_size=window_size,
            scale=scale,
            block_indices=block_indices,
            return_indices=return_indices,
            backend=backend,
        )
    else:
        given = q, k, v, g_cmp, g_slc, g_swa, k_cmp, v_cmp, block_indices, cu_seqlens
        options = *sizes, window_size, scale, return_indices, backend
        made = nsa_forward.call(given, options, _prepare)
        o, chosen, *_ = _by_reference(*given, *options) if made is None else made
    if block_indices is not None and return_indices:
        chosen = block_indices.to(torch.int32)
    return (o, chosen) if return_indices and chosen is not None else o


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    *options: Any,
) -> tuple[Any, ...] | None:
    """The arguments of `nsa_forward`, checked; None where the reference is to compute."""
    *numbers, window_size, scale, return_indices, backend = options
    sizes, gates = Sizes(*numbers), (g_cmp, g_slc, g_swa)
    scale, backend = check(
        q, k, v, gates, k_cmp, v_cmp, block_indices, cu, sizes, window_size, scale, return_indices, backend
    )
    if k_cmp is not None:
        problem.check_windows(q, k_cmp, cu, sizes.compress_size, sizes.compress_stride)
    if backend == "reference":
        return None
    indices, cu = contiguous(block_indices), contiguous(cu)
    return q, k, v, *gates, k_cmp, v_cmp, indices, cu, *sizes, window_size, scale, backend


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    sizes: Sizes,
    window_size: int,
    scale: float | None,
    return_indices: bool,
    backend: str | None,
) -> tuple[float, str]:
    """All that can be said without a look at values, but for the number of windows; the scale and backend to use."""
    problem.check_sizes(sizes)
    checks.check_whole(window_size, "window_size", 1)
    tensors = {"q": q, "k": k, "v": v}
    backend = problem.check_tensors(tensors, cu, backend, sizes.block_size)
    problem.check_lengths(tensors)
    _check_gates(q, *gates, cu is not None)
    if return_indices and gates[1] is None:
        raise ValueError(
            "return_indices is True and g_slc is None: no blocks are selected; give g_slc, or leave return_indices out"
        )
    _check_learned(q, k, v, k_cmp, v_cmp, cu is not None)
    if block_indices is not None:
        axes = "[B, T, Hk, block_count]" if cu is None else "[N, Hk, block_count]"
        checks.check_indices_tensor(
            block_indices, "block_indices", q.device, (*q.shape[:-2], k.shape[-2], sizes.block_count), axes
        )
    return scale_of(q, scale), backend


def _by_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    *numbers, window_size, scale, _, _ = options
    sizes = Sizes(*numbers)
    _check_values(q, k_cmp, block_indices, cu, sizes)
    given = {
        "k_cmp": k_cmp,
        "v_cmp": v_cmp,
        "window_size": window_size,
        "cu_seqlens": cu,
        "block_indices": block_indices,
    }
    named: dict[str, Any] = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa, **sizes._asdict(), **given}
    return reference.native_sparse_attention(q, k, v, scale=scale_of(q, scale), **named)


def _check_gates(
    q: torch.Tensor, g_cmp: torch.Tensor | None, g_slc: torch.Tensor | None, g_swa: torch.Tensor | None, packed: bool
) -> None:
    given = {name: gate for name, gate in zip(GATES, (g_cmp, g_slc, g_swa), strict=True) if gate is not None}
    if not given:
        raise ValueError(
            "g_cmp, g_slc and g_swa are None: give at least one gate, for a gate of None leaves its branch out"
        )
    for name, gate in given.items():
        checks.check_beside(gate, name, q, q.shape[:-1], "[N, Hq]" if packed else "[B, T, Hq]")


def _check_learned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    packed: bool,
) -> None:
    """Compressed keys and values that a module made: both or neither, of k's and v's heads and channels."""
    if k_cmp is None and v_cmp is None:
        return
    if k_cmp is None or v_cmp is None:
        given, missing = ("v_cmp", "k_cmp") if k_cmp is None else ("k_cmp", "v_cmp")
        raise ValueError(f"{given} is given without {missing}: give both, or neither for the windows' means")
    tensors = {"q": q, "k_cmp": k_cmp, "v_cmp": v_cmp}
    checks.check_fit(tensors, checks.check_attention_tensors(tensors, packed, offsets="cu_seqlens"), packed)
    if k_cmp.shape[-2] != k.shape[-2] or v_cmp.shape[-1] != v.shape[-1]:
        raise ValueError(
            "k_cmp and v_cmp must have k's heads, and v_cmp v's channels "
            f"(got shapes {checks.shapes_of({'k': k, 'v': v, 'k_cmp': k_cmp, 'v_cmp': v_cmp})})"
        )


def _check_values(
    q: torch.Tensor,
    k_cmp: torch.Tensor | None,
    block_indices: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    sizes: Sizes,
) -> None:
    problem.check_offset_values(q, cu_seqlens)
    if k_cmp is not None:
        problem.check_window_values(k_cmp, cu_seqlens, sizes.compress_size, sizes.compress_stride)
    if block_indices is not None:
        problem.check_index_values(block_indices, cu_seqlens, sizes.block_size, q.shape[-3])


def _options(numbers: tuple[Any, ...]) -> branches.Options:
    """From the schema's last arguments."""
    *sizes, window_size, scale, backend = numbers
    return branches.Options(Sizes(*sizes), window_size, scale, backend)


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, ...]:
    _check_values(q, k_cmp, indices, cu, _options(numbers).sizes)
    return _plan_forward(q, k, v, g_cmp, g_slc, g_swa, k_cmp, v_cmp, indices, cu, *numbers)


def _plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(branches.forward(q, k, v, (g_cmp, g_slc, g_swa), k_cmp, v_cmp, indices, cu, _options(numbers)))


def _run_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    *saved: Any,
) -> tuple[torch.Tensor, ...]:
    with branches.without_autocast(saved[-1]):
        return _plan_backward(do, q, k, v, g_cmp, g_slc, g_swa, *saved)


def _plan_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    *saved: Any,
) -> tuple[torch.Tensor, ...]:
    return branches.backward(do, branches.Saved(q, k, v, (g_cmp, g_slc, g_swa), *saved[:11]), _options(saved[11:]))


def _fake_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    *numbers: Any,
) -> tuple[torch.Tensor, ...]:
    sizes = _options(numbers).sizes

    def empty(shape: tuple[int, ...], dtype: torch.dtype = q.dtype, there: bool = True) -> torch.Tensor:
        return torch.empty(shape if there else (0,), dtype=dtype, device=q.device)

    tokens, heads = q.shape[-3], k.shape[-2]
    rows = (
        window_count(tokens, sizes.compress_size, sizes.compress_stride)
        if cu is None
        else tokens // sizes.compress_stride
    )
    output, lse = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], tokens)
    means = (
        empty((*q.shape[:-3], rows, heads, x.shape[-1]), there=g_cmp is not None and k_cmp is None) for x in (k, v)
    )
    chosen = empty((*q.shape[:-2], heads, sizes.block_count), torch.int32, g_slc is not None and indices is None)
    each = [
        x
        for gate in (g_cmp, g_slc, g_swa)
        for x in (
            empty(output, there=gate is not None),
            empty(lse, q.dtype if gate is None else torch.float32, gate is not None),
        )
    ]
    return empty(output), chosen, *means, *each


def _fake_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    *saved: Any,
) -> tuple[torch.Tensor, ...]:
    learned = saved[8]
    compressed = (k_cmp, v_cmp) if learned and g_cmp is not None else (None, None)
    return tuple(
        branches.nothing(q) if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (q, k, v, g_cmp, g_slc, g_swa, *compressed)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, g_cmp, g_slc, g_swa, k_cmp, v_cmp, indices, cu, *ctx.numbers = inputs
    _, chosen, made_k, made_v, *each = output
    ctx.set_materialize_grads(False)
    ctx.learned = k_cmp is not None
    k_cmp, v_cmp = (k_cmp, v_cmp) if ctx.learned else (made_k, made_v)
    ctx.save_for_backward(q, k, v, g_cmp, g_slc, g_swa, k_cmp, v_cmp, chosen if indices is None else indices, *each, cu)


def _differentiate(ctx: Any, do: torch.Tensor | None, *_others: Any) -> tuple[torch.Tensor | None, ...]:
    # Once: a checkpoint gives each saved tensor out a single time.
    saved = ctx.saved_tensors
    q, _, v, g_cmp, g_slc, g_swa, *_ = saved
    if do is None:
        do = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    dq, dk, dv, *gates, dk_cmp, dv_cmp = nsa_backward.call_checked((do, *saved), (ctx.learned, *ctx.numbers))
    dgates = (None if gate is None else gradient for gate, gradient in zip((g_cmp, g_slc, g_swa), gates, strict=True))
    compressed = (dk_cmp, dv_cmp) if ctx.learned and g_cmp is not None else (None, None)
    return dq, dk, dv, *dgates, *compressed, *(None,) * (2 + len(ctx.numbers))


_QKV = "Tensor q, Tensor k, Tensor v, Tensor? g_cmp, Tensor? g_slc, Tensor? g_swa"
_NUMBERS = (
    "SymInt compress_size, SymInt compress_stride, SymInt block_size, SymInt block_count, SymInt init_blocks, SymInt"
    " local_blocks, SymInt window_size, float scale, str backend"
)
_EACH = "Tensor o_cmp, Tensor lse_cmp, Tensor o_slc, Tensor lse_slc, Tensor o_swa, Tensor lse_swa"
nsa_backward = register(
    f"nsa_backward(Tensor do, {_QKV}, Tensor k_cmp, Tensor v_cmp, Tensor indices, {_EACH}, Tensor? cu, bool learned,"
    f" {_NUMBERS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg_cmp, Tensor dg_slc, Tensor dg_swa, Tensor dk_cmp,"
    " Tensor dv_cmp)",
    _run_backward,
    _fake_backward,
    plan=_plan_backward,
)
nsa_forward = register(
    f"nsa_forward({_QKV}, Tensor? k_cmp, Tensor? v_cmp, Tensor? indices, Tensor? cu, {_NUMBERS})"
    f" -> (Tensor o, Tensor chosen, Tensor made_k_cmp, Tensor made_v_cmp, {_EACH})",
    _run_forward,
    _fake_forward,
    _differentiate,
    _save,
    plan=_plan_forward,
)
