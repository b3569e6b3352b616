"""Whole heads from the simulation's tiles."""

import torch

from tilewise.ops.flash import simulate


def forward(q, k, v, tiling, options):
    """All query tiles of one head: o and lse."""
    tiles = [dict(simulate.forward(q, k, v, i_m, tiling, options)) for i_m in range(0, q.shape[0], tiling.block_m)]
    return torch.cat([t["O_final"] for t in tiles])[: q.shape[0]], torch.cat([t["LSE"] for t in tiles])[: q.shape[0]]


def backward(q, k, v, o, lse, do, dlse, tiling_dkdv, tiling_dq, options):
    """dq [G, Tq, D], dk and dv of one key head."""
    delta, lse_log2 = zip(*(simulate.prepare(*rows) for rows in zip(o, do, lse, dlse, strict=True)), strict=True)

    def of_queries(q, do, lse_log2, delta):
        tiles = range(0, len(q), tiling_dq.block_m)
        found = [dict(simulate.backward_dq(q, k, v, do, lse_log2, delta, i_m, tiling_dq, options)) for i_m in tiles]
        return torch.cat([tile["dQ_final"] for tile in found])[: len(q)]

    dq = torch.stack([of_queries(*rows) for rows in zip(q, do, lse_log2, delta, strict=True)])
    ends = [
        dict(simulate.backward_dkdv(q, k, v, do, torch.stack(lse_log2), torch.stack(delta), i_n, tiling_dkdv, options))
        for i_n in range(0, k.shape[0], tiling_dkdv.block_n)
    ]
    dk, dv = (
        torch.cat([end[name] for end in ends])[: k.shape[0]] if ends else k.new_zeros(0)
        for name in ("dK_final", "dV_final")
    )
    return dq, dk, dv
