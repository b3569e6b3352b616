"""What ranks run in the tests of native sparse attention over several processes."""

import gc
import itertools
import weakref

import torch
import torch.distributed as dist
from parallel.flash_ranks import counting

from tilewise import native_sparse_attention
from tilewise.nn.native_sparse_attention import NativeSparseAttention, windows_of
from tilewise.ops.nsa.problem import window_count
from tilewise.parallel import ContextPlan, flash

SIZES = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 8,
    "block_count": 4,
    "init_blocks": 1,
    "local_blocks": 2,
    "window_size": 11,
}
GATES = ("g_cmp", "g_slc", "g_swa")


def inputs(batch, offsets, heads, kv_heads, D, Dv, dtype, gates=GATES, learned=False, given=None):
    """Whole tensors by name, and the output's gradient, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    packed, tokens = len(offsets) > 2, offsets[-1]
    lead, before = ((tokens,), ()) if packed else ((batch, tokens), (batch,))
    shapes = {"q": (*lead, heads, D), "k": (*lead, kv_heads, D), "v": (*lead, kv_heads, Dv)}
    shapes |= dict.fromkeys(gates, (*lead, heads))
    if learned:
        lengths = (b - a for a, b in itertools.pairwise(offsets))
        count = sum(window_count(length, SIZES["compress_size"], SIZES["compress_stride"]) for length in lengths)
        shapes |= {"k_cmp": (*before, count, kv_heads, D), "v_cmp": (*before, count, kv_heads, Dv)}
    shapes["do"] = *lead, heads, Dv
    # Wide apart, so that rounding chooses no other blocks.
    found = {
        name: torch.randn(shape, generator=generator) * (2.0 if name == "q" else 1.0) for name, shape in shapes.items()
    }
    found = {name: x.to(dtype) for name, x in found.items()}
    if given is not None:
        # Some twice, some of none, some that are seen by half of the queries only.
        lengths = torch.tensor(offsets).diff()
        blocks = -(-lengths // SIZES["block_size"]).repeat_interleave(lengths)[:, None, None]
        drawn = torch.rand((*lead, kv_heads, SIZES["block_count"]), generator=generator) * (blocks + 1)
        found["block_indices"] = (drawn.floor() - 1).to(given)
    return found, found.pop("do")


def whole(sizes, offsets, dtype, options, backend):
    """One process: output, blocks, gradients by name."""
    given, do = inputs(*sizes[:1], offsets, *sizes[1:], dtype, **options)
    cu = {"cu_seqlens": torch.tensor(offsets)} if len(offsets) > 2 else {}
    return found(given, do, backend, **cu)


def found(given, do, backend, **more):
    given = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    chooses = "g_slc" in given
    named = dict.fromkeys(GATES) | given
    result = native_sparse_attention(**named, **SIZES, return_indices=chooses, backend=backend, **more)
    o, chosen = result if chooses else (result, None)
    gradients = torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True) if x is not None}
    return {"o": o.detach(), **({} if chosen is None else {"chosen": chosen}), **named}


def sharded(group, sizes, offsets, dtype, options, backend, plan_options):
    """The same over a group, unsharded; partial gradients summed."""
    packed = len(offsets) > 2
    where = {"cu_seqlens": torch.tensor(offsets)} if packed else {"seq_len": offsets[-1]}
    plan_options = dict(plan_options)
    flash.FETCHED_BYTES = 1 if plan_options.pop("heads_at_a_time", None) == 1 else 1 << 28
    plan = ContextPlan(group, **where, **plan_options)
    given, do = inputs(*sizes[:1], offsets, *sizes[1:], dtype, **options)
    axis = 0 if packed else 1
    local = {name: x if name in ("k_cmp", "v_cmp") else plan.shard(x, axis) for name, x in given.items()}
    runs = [found(local, plan.shard(do, axis), backend, parallel=plan) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0]), "not the same bits again"
    result = {}
    for name, x in runs[0].items():
        if name in ("dk_cmp", "dv_cmp"):
            dist.all_reduce(x, group=group)
            result[name] = x
        else:
            result[name] = plan.unshard(x, axis)
    return result


def windows(group, offsets, balance, size, stride):
    """Learned windows: what `of` and `whole` give, and the gradients of local tokens, beside one process's."""
    packed, tokens = len(offsets) > 2, offsets[-1]
    where = {"cu_seqlens": torch.tensor(offsets)} if packed else {"seq_len": tokens}
    plan = ContextPlan(group, **where, balance=balance)
    axis = 0 if packed else 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*((tokens,) if packed else (2, tokens)), 3, generator=generator, dtype=torch.float64)
    places = torch.linspace(1.0, 2.0, size, dtype=torch.float64)
    cu = torch.tensor(offsets) if packed else None
    one = x.clone().requires_grad_()
    expected = torch.einsum("bcpd,p->bcd", windows_of(one[..., None], size, stride, cu)[..., 0], places)
    expected = expected[0] if packed else expected
    dy = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    local = plan.shard(x, axis).detach().requires_grad_()
    found = plan.windows(size, stride)
    y = found.whole((found.of(local).movedim(axis + 1, -1) * places).sum(-1))
    torch.testing.assert_close(y, expected)
    # Every rank computes all of it.
    (dx,) = torch.autograd.grad(y, local, dy / plan.world)
    torch.testing.assert_close(plan.unshard(dx, axis), *torch.autograd.grad(expected, one, dy))


def refused(group):
    """What is raised."""
    plan = ContextPlan(group, seq_len=80)
    given, _ = inputs(1, [0, 80], 4, 2, 16, 16, torch.float32, learned=True, given=torch.int32)
    local = {name: x if name in ("k_cmp", "v_cmp") else plan.shard(x, 1) for name, x in given.items()}
    few = {"k_cmp": given["k_cmp"][:, :9], "v_cmp": given["v_cmp"][:, :9]}
    messages = []
    for change in (
        {"parallel": ContextPlan(group, seq_len=80, method="ring")},
        {"cu_seqlens": torch.tensor([0, 40])},
        few,
        {"block_indices": torch.full_like(local["block_indices"], 10)},
        {name: local[name][:, :39] for name in ("q", "k", "v")},
    ):
        try:
            native_sparse_attention(**({**local, "parallel": plan, **SIZES} | change), backend="cpu")
        except ValueError as error:
            messages.append(str(error).replace(f"rank {plan.rank}", "rank #"))
    q = local["q"].requires_grad_()
    o = native_sparse_attention(**local, **SIZES, parallel=plan, backend="cpu")
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    try:
        dq.square().sum().backward()
    except NotImplementedError as error:
        messages.append(str(error))
    return messages


def compiled(group):
    """A layer's output and gradients in eager torch and inside torch.compile, and how many graphs that made by two
    plans, one after the other.
    """
    torch.manual_seed(0)
    layer = NativeSparseAttention(32, 4, 2, **SIZES, compression="learned")
    x, graphs, found = torch.randn(2, 97, 32), [], []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    for way in (layer, torch.compile(layer, backend=counting), torch.compile(layer, backend=counting)):
        plan = ContextPlan(group, seq_len=97)
        o = way(plan.shard(x, 1), parallel=plan)
        found.append([o.detach(), *torch.autograd.grad(o.sin().sum(), list(layer.parameters()))])
    torch._dynamo.reset()
    return *found, len(graphs)


def freed(group):
    """Without the collector of cycles: a plan holds memory of a GPU, of which that knows nothing."""
    plan = ContextPlan(group, seq_len=40)
    windows = plan.windows(8, 4)
    windows.whole(windows.of(torch.ones(1, plan.local_tokens, 1)))
    seen = weakref.ref(plan)
    gc.disable()
    try:
        del plan, windows
        assert seen() is None
    finally:
        gc.enable()


def of_one(group):
    """What is raised for tensors of another length than the plan's."""
    given, _ = inputs(1, [0, 60], 4, 2, 16, 16, torch.float32)
    try:
        native_sparse_attention(**given, **SIZES, parallel=ContextPlan(group, seq_len=80), backend="cpu")
    except ValueError as error:
        return str(error)


def sent_for_windows_alone(group):
    """Bytes that a forward and a backward of a learned compression alone send."""
    plan = ContextPlan(group, seq_len=80)
    given, do = inputs(1, [0, 80], 4, 2, 16, 16, torch.float32, gates=("g_cmp",), learned=True)
    local = {name: x if name in ("k_cmp", "v_cmp") else plan.shard(x, 1) for name, x in given.items()}
    found(local, plan.shard(do, 1), "cpu", parallel=plan)
    with counting(plan) as (sent, _):
        found(local, plan.shard(do, 1), "cpu", parallel=plan)
    return sum(sent)
