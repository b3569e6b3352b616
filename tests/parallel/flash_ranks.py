"""What ranks run in the tests of flash attention over several processes."""

import torch

from tilewise import flash_attention
from tilewise.parallel import ContextPlan, flash


def inputs(batch, tokens, heads, kv_heads, D, Dv, packed, dtype, seed=0):
    """Whole q, k, v, do, dlse and sinks, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    lead = (tokens,) if packed else (batch, tokens)
    shapes = (*lead, heads, D), (*lead, kv_heads, D), (*lead, kv_heads, Dv), (*lead, heads, Dv)
    q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    dlse = torch.randn(*lead[:-1], heads, tokens, generator=generator)
    sinks = torch.randn(heads, generator=generator)
    return q, k, v, do, dlse, sinks


def whole(sizes, offsets, dtype, options, with_sinks, backend):
    """One process: o, lse, dq, dk, dv, dsinks."""
    tokens = offsets[-1]
    q, k, v, do, dlse, sinks = inputs(*sizes[:1], tokens, *sizes[1:], len(offsets) > 2, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v, *((sinks,) if with_sinks else ()))]
    cu = {"cu_seqlens_q": torch.tensor(offsets)} if len(offsets) > 2 else {}
    more = {"sinks": sinks} if with_sinks else {}
    o, lse = flash_attention(q, k, v, **cu, **options, **more, return_lse=True, backend=backend)
    return [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), leaves, (do, dlse.to(lse.dtype)))]


def sharded(group, sizes, offsets, dtype, options, with_sinks, backend, plan_options):
    """The same over a group, unsharded; sinks' gradient summed."""
    packed, tokens = len(offsets) > 2, offsets[-1]
    where = {"cu_seqlens": torch.tensor(offsets)} if packed else {"seq_len": tokens}
    plan_options = dict(plan_options)
    one_head = plan_options.pop("heads_at_a_time", None) == 1
    flash.FETCHED_BYTES = 1 if one_head else 1 << 28
    plan = ContextPlan(group, **where, **plan_options)
    q, k, v, do, dlse, sinks = inputs(*sizes[:1], tokens, *sizes[1:], packed, dtype)
    axis = 0 if packed else 1
    local = [plan.shard(x, axis) for x in (q, k, v)]
    leaves = [x.requires_grad_() for x in (*local, *((sinks,) if with_sinks else ()))]
    more = {"sinks": sinks} if with_sinks else {}
    found = []
    for _ in range(2):
        o, lse = flash_attention(*local, **options, **more, return_lse=True, backend=backend, parallel=plan)
        assert (o.shape, lse.shape) == (plan.shard(do, axis).shape, plan.shard(dlse, -1).shape)
        given = plan.shard(do, axis), plan.shard(dlse, -1).to(lse.dtype)
        found.append([o.detach(), lse.detach(), *torch.autograd.grad((o, lse), leaves, given)])
    assert all(map(torch.equal, *found)), "not the same bits again"
    o, lse, dq, dk, dv, *rest = found[0]
    whole = [plan.unshard(x, axis) for x in (o, dq, dk, dv)]
    for dsinks in rest:
        torch.distributed.all_reduce(dsinks, group=group)
    return [whole[0], plan.unshard(lse, -1), *whole[1:], *rest]
