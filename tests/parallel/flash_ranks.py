"""What ranks run in the tests of flash attention over several processes."""

import contextlib
import gc
import types

import torch
import torch.distributed as dist

from tilewise import flash_attention
from tilewise.parallel import ContextPlan, exchange, flash, parts


def inputs(batch, tokens, heads, kv_heads, D, Dv, packed, dtype, seed=0):
    """Whole q, k, v, do, dlse and sinks, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    lead = (tokens,) if packed else (batch, tokens)
    shapes = (*lead, heads, D), (*lead, kv_heads, D), (*lead, kv_heads, Dv), (*lead, heads, Dv)
    q, k, v, do = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    dlse = torch.randn(*lead[:-1], heads, tokens, generator=generator)
    # A parameter may be a view.
    sinks = torch.randn(2 * heads, generator=generator)[::2]
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


def compiled(group, method):
    """Results and gradients of a step in eager torch and inside torch.compile; and how many graphs that made by two
    plans, one after the other.
    """
    tokens, graphs = 97, []

    def step(q, k, v, plan):
        o = flash_attention(q * 2, k, v, causal=True, parallel=plan) * 3
        whole = plan.unshard(o, 1).sin() / plan.world
        whole.sum().backward()
        return o, whole

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    inside, found = torch.compile(step, backend=counting), []
    q, k, v, *_ = inputs(2, tokens, 4, 2, 8, 6, False, torch.float32)
    for way in (step, inside, inside):
        plan = ContextPlan(group, seq_len=tokens, method=method)
        leaves = [plan.shard(x, 1).requires_grad_() for x in (q, k, v)]
        o, whole = way(*leaves, plan)
        found.append([o.detach(), whole.detach(), *(x.grad for x in leaves)])
    torch._dynamo.reset()
    return *found, len(graphs)


def on_reference(group):
    """Where a rank has no tokens, gradients of the LSE alone, and second derivatives."""
    tokens = 21
    q, k, v, _, dlse, sinks = inputs(2, tokens, 4, 2, 8, 6, False, torch.float64)

    def found(q, k, v, sinks, dlse, **plan):
        o, lse = flash_attention(q, k, v, sinks=sinks, causal=True, return_lse=True, backend="reference", **plan)
        first = torch.autograd.grad((lse * dlse).sum(), (q, k, sinks), retain_graph=True)
        again = torch.autograd.grad(o.square().sum(), (q, k, v, sinks), create_graph=True)
        return *first, *torch.autograd.grad(sum(x.square().sum() for x in again[:3]), (q, k, v))

    expected = found(*(x.clone().requires_grad_() for x in (q, k, v, sinks.double())), dlse)
    plan = ContextPlan(group, seq_len=tokens, balance=torch.arange(tokens) % 2)
    local = [plan.shard(x, 1).requires_grad_() for x in (q, k, v)]
    dq, dk, dsinks, *twice = found(*local, sinks.double().requires_grad_(), plan.shard(dlse, -1), parallel=plan)
    dist.all_reduce(dsinks, group=group)
    for x, y in zip((dq, dk, *twice), (*expected[:2], *expected[3:]), strict=True):
        torch.testing.assert_close(plan.unshard(x, 1), y)
    torch.testing.assert_close(dsinks, expected[2])


def twice_where_there_is_no_such_derivative(group, method):
    """What is raised."""
    plan = ContextPlan(group, seq_len=8, method=method)
    x = torch.randn(1, plan.local_tokens, 2, 8).requires_grad_()
    (dx,) = torch.autograd.grad(flash_attention(x, x, x, parallel=plan).square().sum(), x, create_graph=True)
    # x also has a gradient of its own, which would hide that dx's is missing.
    torch.autograd.grad(dx.square().sum() + x.sum(), x)


def inferring_then_training(group):
    """One plan serves both, whatever the default device is when it is made."""
    whole = torch.randn(20, 2, 8)
    cu = torch.tensor([0, 9, 20])
    with torch.inference_mode(), torch.device("meta"):
        plan = ContextPlan(group, cu_seqlens=cu)
        x = plan.shard(whole, 0)
        plan.unshard(flash_attention(x, x, x, causal=True, parallel=plan, backend="reference"), 0)
    whole = torch.randn(20, 2, 8).requires_grad_()
    x = plan.shard(whole, 0)
    plan.unshard(flash_attention(x, x, x, causal=True, parallel=plan, backend="reference"), 0).sum().backward()
    assert whole.grad is not None


def sinks_in_16_bits(group):
    """The errors of their gradient where a rank makes hundreds of calls, and that of one process."""
    q, k, v, do, _, sinks = inputs(1, 900, 4, 2, 8, 8, False, torch.float32)
    plan = ContextPlan(group, seq_len=900, balance=torch.arange(900) % 2)

    def gradient(dtype, backend, plan=None):
        leaf = sinks.bfloat16().to(dtype).requires_grad_()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        here = [(x if plan is None else plan.shard(x, 1)).to(wide) for x in (q, k, v, do)]
        o = flash_attention(*here[:3], sinks=leaf, parallel=plan, backend=backend)
        return torch.autograd.grad(o, leaf, here[3])[0].double()

    truth, one, mine = gradient(torch.float64, "reference"), gradient(torch.bfloat16, "cpu"), None
    mine = gradient(torch.bfloat16, "cpu", plan)
    dist.all_reduce(mine, group=group)
    return abs(mine - truth).max(), abs(one - truth).max()


def counted(group, options, tokens, heads_at_a_time, method):
    """What a forward and a backward send to other ranks, in bytes, and the memory that each holds at most while kernels
    run beside inputs and results. Kernels compute nothing here, and hold nothing.
    """
    flash.FETCHED_BYTES = heads_at_a_time * tokens * (64 + 32) * 2
    plan = ContextPlan(group, seq_len=tokens, method=method)
    q, k, v, do, _, _ = inputs(1, tokens, 8, 4, 64, 32, False, torch.bfloat16)
    leaves = [plan.shard(x, 1).requires_grad_() for x in (q, k, v)]
    do = plan.shard(do, 1)
    flash_attention(*leaves, **options, parallel=plan, backend="cpu")
    found = []
    before, seen = held(), []
    with counting(plan) as (sent, _), idle_kernels(nothing, lambda: seen.append(held())):
        o, lse = flash_attention(*leaves, **options, parallel=plan, backend="cpu", return_lse=True)
        results = o.numel() * o.element_size() + lse.numel() * lse.element_size()
        found.append((sum(sent), max(seen) - before - results))
        del sent[:], seen[:]
        torch.autograd.grad(o, leaves, do)
        gradients = sum(x.numel() * x.element_size() for x in leaves)
        found.append((sum(sent), max(seen) - before - results - gradients))
    return found


def held():
    """Bytes of all tensors on the CPU."""
    gc.collect()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gc.get_objects() if is_tensor(x)}
    return sum(storages.values())


def is_tensor(x):
    # No subclass: what torch.compile leaves has no memory.
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu"


def nothing(shape, *, dtype):
    """Zeros without memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


@contextlib.contextmanager
def idle_kernels(make, ran=lambda: None):
    """Kernels that take no time, whose results are `make(shape, dtype=dtype)`; calls `ran` when each ran."""

    def forward(given, _numbers):
        q, _, v, *_ = given
        ran()
        lse = make((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
        return make((*q.shape[:-1], v.shape[-1]), dtype=q.dtype), lse

    def backward(given, _numbers):
        _, _, q, k, v, *_ = given
        ran()
        return *(make(x.shape, dtype=x.dtype) for x in (q, k, v)), None

    before = parts.flash_forward, parts.flash_backward
    parts.flash_forward = types.SimpleNamespace(call_checked=forward)
    parts.flash_backward = types.SimpleNamespace(call_checked=backward)
    try:
        yield
    finally:
        parts.flash_forward, parts.flash_backward = before


@contextlib.contextmanager
def counting(plan):
    """Bytes that this rank sends to others, and receives, collective by collective."""
    sent, came = [], []
    before = dist.all_to_all_single, exchange._all_gather, dist.batch_isend_irecv

    def all_to_all(received, x, receives, sends, **options):
        row = x[0].numel() * x.element_size() if len(x) else 0
        sent.append(row * (sum(sends) - sends[plan.rank]))
        came.append(received[:1].nbytes * (sum(receives) - receives[plan.rank]))
        return before[0](received, x, receives, sends, **options)

    def all_gather(received, x, **options):
        sent.append(x.nbytes * (plan.world - 1))
        came.append(received.nbytes - x.nbytes)
        return before[1](received, x, **options)

    def isend_irecv(operations):
        for one in operations:
            (sent if one.op is dist.isend else came).append(one.tensor.nbytes)
        return before[2](operations)

    dist.all_to_all_single, exchange._all_gather, dist.batch_isend_irecv = all_to_all, all_gather, isend_irecv
    try:
        yield sent, came
    finally:
        dist.all_to_all_single, exchange._all_gather, dist.batch_isend_irecv = before
