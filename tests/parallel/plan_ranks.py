"""What ranks run in the tests of plans."""

import torch
import torch.distributed as dist

from tilewise import flash_attention
from tilewise.parallel import ContextPlan


def pieces(group, options):
    """What a plan says of its rank, and a tensor there and back, with its gradient."""
    plan = ContextPlan(group, **options)
    x = torch.arange(plan.tokens * 6.0).reshape(3, plan.tokens, 2).requires_grad_()
    local = plan.shard(x, 1)
    back = plan.unshard(local * 2, 1)
    assert torch.equal(back, 2 * x)
    # Each rank counts the whole by its own factor, and its own part once more.
    loss = (back * (plan.rank + 1)).sum() + local.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    cu = None if plan.local_cu_seqlens is None else plan.local_cu_seqlens.tolist()
    return plan.local_tokens, plan.position_ids.tolist(), cu, local.detach(), gradient


def on_a_mesh(_group):
    """Two by two processes: a plan of each row."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    plan = ContextPlan(mesh["context"], seq_len=10)
    try:
        ContextPlan(mesh, seq_len=10)
    except ValueError as error:
        return plan.rank, plan.world, plan.local_tokens, str(error)


def disagreeing(group):
    """A rank whose heads differ."""
    plan = ContextPlan(group, seq_len=64)
    x = torch.zeros(1, plan.local_tokens, 2 + 2 * plan.rank, 16)
    flash_attention(x, x, x, parallel=plan)


def other_plans(group):
    """A rank whose plan is another."""
    plan = ContextPlan(group, seq_len=64, balance="contiguous" if dist.get_rank(group) else "head_tail")
    x = torch.zeros(1, plan.local_tokens, 2, 16)
    flash_attention(x, x, x, parallel=plan)


def other_offsets(group):
    """A rank whose sequences are others, of tokens that are divided alike."""
    cu = torch.tensor([0, 3 + dist.get_rank(group), 8])
    plan = ContextPlan(group, cu_seqlens=cu, balance=torch.arange(8) % 2)
    x = torch.zeros(4, 2, 16)
    flash_attention(x, x, x, parallel=plan)


def outside(_group):
    """A plan of a group that only the first process is in."""
    ContextPlan(dist.new_group([0]), seq_len=4)


def one_stops(group):
    """The second rank stops before its call."""
    plan = ContextPlan(group, seq_len=64)
    x = torch.zeros(1, plan.local_tokens, 2, 16)
    flash_attention(x, x, x, parallel=plan)
    if plan.rank == 1:
        raise ArithmeticError("out of luck")
    flash_attention(x, x, x, parallel=plan)


def refused(group):
    """Messages of calls that no rank begins."""
    plan = ContextPlan(group, seq_len=64)
    whole = torch.zeros(1, 64, 2, 16)
    x = plan.shard(whole, 1)
    nan = float("nan")
    messages = []
    for call in (
        lambda: flash_attention(whole, whole, whole, parallel=plan),
        lambda: flash_attention(x, x, x, parallel=plan, num_splits=2),
        lambda: flash_attention(x, x, x, parallel=plan, seqused_k=torch.tensor([3])),
        lambda: flash_attention(x[0], x[0], x[0], parallel=plan, cu_seqlens_q=torch.tensor([0, 32])),
        lambda: flash_attention(x, x, x, parallel=plan, scale=nan),
        lambda: flash_attention(x, x, x, parallel=plan, softcap=-1.0),
        lambda: flash_attention(x, x, x, parallel=plan, sinks=torch.tensor([0.0, nan])),
        lambda: flash_attention(*[x.double()] * 3, parallel=plan, backend="cpu"),
        lambda: plan.shard(x, 1),
        lambda: plan.unshard(whole, 1),
        lambda: ContextPlan(group),
        lambda: ContextPlan(group, seq_len=-1),
        lambda: ContextPlan(group, cu_seqlens=torch.tensor([0, 5, 3])),
        lambda: ContextPlan(group, cu_seqlens=torch.tensor([0.0])),
        lambda: ContextPlan(group, seq_len=8, balance="zigzag"),
        lambda: ContextPlan(group, seq_len=8, balance=torch.zeros(7, dtype=torch.int64)),
        lambda: ContextPlan(group, seq_len=2, balance=torch.tensor([0, 2])),
        lambda: ContextPlan(group, seq_len=8, method="broadcast"),
        lambda: ContextPlan(group, seq_len=2, balance=[0, 1]),
        lambda: ContextPlan(group, cu_seqlens=[0, 5]),
        lambda: ContextPlan("context", seq_len=8),
    ):
        try:
            call()
        except (ValueError, TypeError) as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages
