"""A prefill against a dense cache by Hopper's forward kernel, which reads whole caches as packed sequences.

Between an entry's keys and the next one's lie rows that are none: every second sequence has these, and no queries.
"""

import torch

from tilewise.ops._host import gluon
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.program import emit
from tilewise.ops._host.symbol import compute
from tilewise.ops.flash.configs import Inputs as FlashInputs
from tilewise.ops.flash.decode.configs import SPLIT_TOKENS, Inputs
from tilewise.ops.flash.decode.kernels import Cache, flash_prefill_offsets_kernel
from tilewise.ops.flash.hopper.configs import SHORT_KEYS, choose_forward
from tilewise.ops.flash.route import why_not_hopper

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch

# Tiles depend neither on an entry's length, which the host does not know, nor on the cache's room.
KEYS = SHORT_KEYS + 1


def is_long(inputs: Inputs) -> bool:
    """Whether this call is a prefill that is not split."""
    return inputs.cu_q is None and inputs.num_splits <= 1 and inputs.q.shape[1] > SPLIT_TOKENS


def why_not(inputs: Inputs) -> str | None:
    """Why Hopper's kernel does not take it; None where it does."""
    if inputs.table is not None:
        return "keys in pages"
    for name, x in (("q", inputs.q), ("the keys", inputs.k), ("the values", inputs.v)):
        # Of a single entry the same is asked: what runs does not depend on the batch.
        if x.stride(0) != x.shape[1] * x.stride(1):
            return f"entries of {name} do not follow one another"
    return why_not_hopper("forward", _packed(inputs), keys=KEYS)


def _packed(inputs: Inputs, cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None) -> FlashInputs:
    """The call with all entries in one axis, by these offsets."""
    q, k, v = inputs.q.flatten(0, 1), inputs.k.flatten(0, 1), inputs.v.flatten(0, 1)
    return FlashInputs(q, k, v, cu_q, cu_k, inputs.left, inputs.right, inputs.scale, inputs.softcap, sinks=inputs.sinks)


def _by_entry(lse: torch.Tensor, batch: int) -> torch.Tensor:
    return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()


def plan_forward(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, Tq, Hq, Dv] in q's dtype and fp32 LSE [B, Hq, Tq]."""
    q, v = inputs.q, inputs.v
    batch, queries, heads, channels = q.shape
    o = q.new_empty((batch, queries, heads, v.shape[-1]))
    lse = q.new_empty((heads, batch * queries), dtype=torch.float32)
    cu_q, cu_k = (q.new_empty((2 * batch + 1,), dtype=torch.int32) for _ in range(2))
    offsets = {
        "cu_q": cu_q,
        "cu_k": cu_k,
        "cache": Cache(None, inputs.lengths, inputs.leftpad, None),
        "n_batch": batch,
        "n_queries": queries,
        "n_keys": inputs.room,
        "added": inputs.added,
        "num_warps": 1,
    }
    config = choose_forward(
        channels, v.shape[-1], KEYS, bool(inputs.softcap), inputs.left is not None, inputs.right is not None
    )
    forward = hopper_launch.forward_launch(_packed(inputs, cu_q, cu_k), o.flatten(0, 1), lse, config)
    emit(q, Launch(flash_prefill_offsets_kernel, batch, offsets), forward)
    return o, compute(_by_entry, lse, batch, shape=(batch, heads, queries), dtype=torch.float32)
