"""The branches of native sparse attention in order, forward and backward, so that little memory lives at once.

A branch that is left out has empty tensors in its place, for a registered operator returns a fixed number of them.
"""

import contextlib
from typing import Any, NamedTuple

import torch

from tilewise.ops._host.backend import HAS_TRITON
from tilewise.ops.flash import cpu as flash_cpu
from tilewise.ops.nsa import cpu
from tilewise.ops.nsa.problem import Sizes, given_windows

if HAS_TRITON:
    from tilewise.ops.flash import launch as flash_launch
    from tilewise.ops.nsa import launch

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Two modules with the same functions.
KERNELS: dict[str, Any] = {"cpu": cpu} | ({"triton": launch} if HAS_TRITON else {})


class Options(NamedTuple):
    """What one call of native_sparse_attention computes besides its tensors."""

    sizes: Sizes
    window_size: int
    scale: float
    backend: str

    @property
    def compression(self) -> tuple[int, int]:
        """Size and stride of the windows."""
        return self.sizes.compress_size, self.sizes.compress_stride


class Results(NamedTuple):
    """The output, and what the backward needs: the blocks chosen here, the means made here, and each branch's output
    and LSE.
    """

    o: torch.Tensor
    indices: torch.Tensor
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    o_cmp: torch.Tensor
    lse_cmp: torch.Tensor
    o_slc: torch.Tensor
    lse_slc: torch.Tensor
    o_swa: torch.Tensor
    lse_swa: torch.Tensor


def nothing(q: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A placeholder for an absent tensor; a new one each time, since an operator's outputs must not be the same
    tensor.
    """
    return q.new_empty((0,), dtype=dtype or q.dtype)


def without_autocast(backend: str) -> contextlib.AbstractContextManager[Any]:
    """For the backward on the CPU: the forward runs with autocast off, and a backward may be called inside it."""
    return torch.autocast("cpu", enabled=False) if backend == "cpu" else contextlib.nullcontext()


def fake_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE without data."""
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    return o, torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device=q.device)


def fake_gradients(do: torch.Tensor, dlse: torch.Tensor | None, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv without data."""
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors[:3])


def window_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu: torch.Tensor | None,
    window_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the last window_size keys, the query's own included."""
    if backend == "cpu":
        return flash_cpu.forward(q, k, v, cu, cu, flash_cpu.Options(True, (window_size - 1, 0), scale, 0.0))
    return flash_launch.plan_forward(flash_launch.make_inputs(q, k, v, cu, cu, True, window_size - 1, 0, scale, 0.0))


def window_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    cu: torch.Tensor | None,
    window_size: int,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of `window_forward`."""
    if backend == "cpu":
        return flash_cpu.backward(
            q, k, v, o, lse, do, None, cu, cu, flash_cpu.Options(True, (window_size - 1, 0), scale, 0.0)
        )
    return flash_launch.plan_backward(
        flash_launch.make_inputs(q, k, v, cu, cu, True, window_size - 1, 0, scale, 0.0), o, lse, do, None
    )


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    indices: torch.Tensor | None,
    cu: torch.Tensor | None,
    options: Options,
) -> Results:
    """All branches whose gate is given; compressed scores also where blocks are to be chosen by them."""
    kernels, (sizes, window_size, scale, backend), compression = KERNELS[options.backend], options, options.compression
    g_cmp, g_slc, g_swa = gates
    made_k, made_v, o_cmp, lse_cmp, o_slc, lse_slc, o_swa, lse_swa = (nothing(q) for _ in range(8))
    chosen = nothing(q, torch.int32)
    choosing = g_slc is not None and indices is None
    if g_cmp is not None or choosing:
        if k_cmp is None:
            windows = kernels.mean_windows(cu, k.shape[-3], sizes.compress_stride)
            k_cmp = kernels.compress(k, cu, windows, *compression)
            if g_cmp is not None:
                made_k, v_cmp = k_cmp, kernels.compress(v, cu, windows, *compression)
                made_v = v_cmp
        else:
            windows = given_windows(cu, k_cmp.shape[-3], *compression)
        # Where only the choice needs scores, their LSE is enough: the keys stand in for the values.
        o_cmp, lse_cmp = kernels.compressed_forward(
            q, k_cmp, k_cmp if g_cmp is None else v_cmp, cu, windows, *compression, scale
        )
        if choosing:
            indices = chosen = kernels.choose(q, k_cmp, lse_cmp, cu, windows, sizes, scale)
        if g_cmp is None:
            o_cmp, lse_cmp = nothing(q), nothing(q)
    if g_slc is not None:
        o_slc, lse_slc = kernels.selected_forward(q, k, v, indices, cu, sizes.block_size, scale)
    if g_swa is not None:
        o_swa, lse_swa = window_forward(q, k, v, cu, window_size, scale, backend)
    branches = [(output, gate) for output, gate in ((o_cmp, g_cmp), (o_slc, g_slc), (o_swa, g_swa)) if gate is not None]
    o = kernels.combine([output for output, _ in branches], [gate for _, gate in branches])
    return Results(o, chosen, made_k, made_v, o_cmp, lse_cmp, o_slc, lse_slc, o_swa, lse_swa)


def _add(total: list[torch.Tensor | None], more: tuple[torch.Tensor, ...]) -> None:
    """Add gradients to those there are, in place, or begin with them."""
    for i, gradient in enumerate(more):
        so_far = total[i]
        total[i] = gradient if so_far is None else so_far.add_(gradient)


class Saved(NamedTuple):
    """What the backward takes besides the output's gradient. k_cmp and v_cmp are the given ones, or the means where
    `learned` is False.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor
    indices: torch.Tensor
    o_cmp: torch.Tensor
    lse_cmp: torch.Tensor
    o_slc: torch.Tensor
    lse_slc: torch.Tensor
    o_swa: torch.Tensor
    lse_swa: torch.Tensor
    cu: torch.Tensor | None
    learned: bool


def _selected(saved: Saved, gate: torch.Tensor, do: torch.Tensor, options: Options) -> tuple[Gradients, torch.Tensor]:
    kernels = KERNELS[options.backend]
    q, k, v = saved.q, saved.k, saved.v
    do, dgate = kernels.combine_backward(do, saved.o_slc, gate)
    sizes, scale = options.sizes, options.scale
    return kernels.selected_backward(
        q, k, v, saved.indices, saved.o_slc, saved.lse_slc, do, None, saved.cu, sizes.block_size, scale
    ), dgate


def _window(saved: Saved, gate: torch.Tensor, do: torch.Tensor, options: Options) -> tuple[Gradients, torch.Tensor]:
    do, dgate = KERNELS[options.backend].combine_backward(do, saved.o_swa, gate)
    _, window_size, scale, backend = options
    dq, dk, dv = window_backward(
        saved.q, saved.k, saved.v, saved.o_swa, saved.lse_swa, do, saved.cu, window_size, scale, backend
    )
    return (dq, dk, dv), dgate


def _compressed(saved: Saved, gate: torch.Tensor, do: torch.Tensor, options: Options) -> tuple[Gradients, torch.Tensor]:
    """The last two gradients are those of k_cmp and v_cmp where they are learned, else those of k and v."""
    kernels, compression, cu, tokens = KERNELS[options.backend], options.compression, saved.cu, saved.k.shape[-3]
    do, dgate = kernels.combine_backward(do, saved.o_cmp, gate)
    k_cmp, v_cmp = saved.k_cmp, saved.v_cmp
    windows = (
        given_windows(cu, k_cmp.shape[-3], *compression)
        if saved.learned
        else kernels.mean_windows(cu, tokens, compression[1])
    )
    dq, dk, dv = kernels.compressed_backward(
        saved.q, k_cmp, v_cmp, saved.o_cmp, saved.lse_cmp, do, None, cu, windows, *compression, options.scale
    )
    if not saved.learned:
        dk, dv = (kernels.compress_backward(x, tokens, cu, windows, *compression) for x in (dk, dv))
    return (dq, dk, dv), dgate


def backward(do: torch.Tensor, saved: Saved, options: Options) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv, the gates' gradients, and dk_cmp and dv_cmp where they are learned: empty where there is nothing to
    differentiate.
    """
    dg_cmp, dg_slc, dg_swa, dk_cmp, dv_cmp = (nothing(saved.q) for _ in range(5))
    g_cmp, g_slc, g_swa = saved.gates
    total: list[torch.Tensor | None] = [None, None, None]
    if g_slc is not None:
        part, dg_slc = _selected(saved, g_slc, do, options)
        _add(total, part)
    if g_swa is not None:
        part, dg_swa = _window(saved, g_swa, do, options)
        _add(total, part)
        # Otherwise it would stay allocated through the next branch.
        del part
    if g_cmp is not None:
        part, dg_cmp = _compressed(saved, g_cmp, do, options)
        if saved.learned:
            _, dk_cmp, dv_cmp = part
        _add(total, part[:1] if saved.learned else part)
    qkv = (saved.q, saved.k, saved.v)
    dq, dk, dv = (
        x.new_zeros(x.shape) if gradient is None else gradient for x, gradient in zip(qkv, total, strict=True)
    )
    return dq, dk, dv, dg_cmp, dg_slc, dg_swa, dk_cmp, dv_cmp
