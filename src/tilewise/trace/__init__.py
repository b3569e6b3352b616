"""A kernel's named values, tile by tile, compared with a simulation of the same tiling, and the first mismatch.

Here is the simulation of one head, for people: block_flash_attention.
"""

import math
from pathlib import Path

import torch

from tilewise.ops.flash.simulate import Options, Tiling, forward
from tilewise.trace.record import Event, Recording, record
from tilewise.trace.values import Values, as_text

__all__ = ["Event", "Recording", "block_flash_attention", "record"]


# Values with one row per key, not per query.
BY_KEY = ("K", "V")


def warp_rows(block_m: int, n_warps: int, warp: int) -> slice:
    """The rows of a query tile that a warp owns."""
    if not 0 <= warp < n_warps or block_m % n_warps:
        raise ValueError(
            f"warp {warp} of {n_warps} owns no whole rows of {block_m}: expected a warp from 0 to {n_warps - 1}, and"
            " warps that divide block_m"
        )
    return slice(warp * (block_m // n_warps), (warp + 1) * (block_m // n_warps))


def only_rows(values: Values, rows: slice) -> Values:
    """Values by query cut to `rows`."""
    return {name: value if name.split("_")[0] in BY_KEY else value[rows] for name, value in values.items()}


def block_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_m: int,
    block_n: int,
    n_warps: int = 4,
    warp: int | None = None,
    out: str | Path | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    fused_softmax: bool = True,
    reverse: bool = False,
) -> torch.Tensor:
    """Flash attention of one head, tile by tile as a kernel does it: q [Tq, D], k [Tk, D], v [Tk, Dv] -> o [Tq, Dv] in
    q's dtype.

    With `out`, every named value (Q, K_i, S_pre_scaling_i, S_i, M_i, L_i, P_i, V_i, O_scale_i, O_i, O_final, LSE) is
    written there, by query tile; `warp` of `n_warps` keeps the rows that this warp owns. `fused_softmax` works in base
    2 with scale · log2(e) folded in, else in base e; `reverse` walks the key tiles from the last to the first.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.ndim != 2 or k.ndim != 2 or v.ndim != 2:
        raise ValueError(
            f"expected one head, [T, D] each, got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: index one"
            " batch entry and head"
        )
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    tiling = Tiling(block_m, block_n, fused_softmax, reverse)
    options = Options(scale, right=0 if causal else None)
    parts: list[torch.Tensor] = []
    texts: list[str] = []
    for i_m in range(0, q.shape[0], block_m):
        values = dict(forward(q, k, v, i_m, tiling, options))
        parts.append(values["O_final"])
        arrays = {name: x.detach().double().cpu().numpy() for name, x in values.items()}
        arrays = arrays if warp is None else only_rows(arrays, warp_rows(block_m, n_warps, warp))
        texts.append(f"#### queries {i_m} to {min(i_m + block_m, q.shape[0]) - 1}\n\n{as_text(arrays)}")
    if out is not None:
        Path(out).write_text("\n".join(texts), encoding="utf-8")
    return torch.cat([*parts, q.new_zeros(0, v.shape[1])])[: q.shape[0]].to(q.dtype)
