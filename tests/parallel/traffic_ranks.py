"""What ranks run in the tests of what is counted without them."""

import weakref
from unittest import mock

import torch
from parallel.flash_ranks import counting, idle_kernels
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise import flash_attention, native_sparse_attention
from tilewise.parallel import ContextPlan, flash


class Peak(TorchDispatchMode):
    """Bytes of the tensors that are made inside, while they live: the most at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, function, _types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        there = set(map(storage, tensors((arguments, named))))
        for x in tensors(found):
            if storage(x) not in there:
                there.add(storage(x))
                memory = x.untyped_storage()
                self.now += memory.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(memory, self.release, memory.nbytes())
        return found

    def release(self, size):
        self.now -= size


def tensors(found):
    return [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]


def storage(x):
    return x.untyped_storage()._cdata


def measured(group, cu_seqlens, balance, method, layer, fetched_bytes):
    """(sent, received, peak) of a forward, then of a backward, of kernels that hold nothing but their results."""
    where = {"seq_len": int(cu_seqlens[-1])} if len(cu_seqlens) == 2 else {"cu_seqlens": cu_seqlens}
    plan = ContextPlan(group, **where, balance=balance, method=method)

    def attend(q, k, v):
        return flash_attention(q, k, v, causal=True, return_lse=True, parallel=plan, backend="cpu")

    with idle_kernels(torch.empty):
        return least(plan, attend, layer, 0, fetched_bytes)


def measured_sparse(group, tokens, layer, fetched_bytes):
    """The same of native sparse attention, with what its kernels hold."""
    plan = ContextPlan(group, seq_len=tokens)

    def attend(q, k, v, *gates):
        named = dict(zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True))
        return (native_sparse_attention(q, k, v, **named, parallel=plan, backend="cpu"),)

    return least(plan, attend, layer, 3, fetched_bytes)


def least(plan, attend, layer, gates, fetched_bytes):
    """Of several calls, for gloo's threads may let go of what was sent a little later; the first, which also compares
    what ranks are about to do, does not count.
    """
    lead = (plan.local_tokens,) if plan.packed else (1, plan.local_tokens)
    shapes = [(layer.heads, layer.dim), (layer.kv_heads, layer.dim), (layer.kv_heads, layer.value_dim)]
    shapes += [(layer.heads,)] * gates
    leaves = [torch.zeros(*lead, *shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    do = torch.zeros(*lead, layer.heads, layer.value_dim, dtype=torch.bfloat16)
    with mock.patch.object(flash, "FETCHED_BYTES", fetched_bytes):
        found = [once(plan, attend, leaves, do) for _ in range(4)][1:]
    return [min(directions) for directions in zip(*found, strict=True)]


def once(plan, attend, leaves, do):
    """Of one forward and one backward."""
    inputs = sum(x.nbytes for x in leaves)
    found = []
    with counting(plan) as (sent, came):
        with Peak() as peak:
            o, *_rest = attend(*leaves)
        found.append((sum(sent), sum(came), inputs + peak.most))
        kept = inputs + peak.now + do.nbytes
        del sent[:], came[:]
        with Peak() as peak:
            torch.autograd.grad(o, leaves, do)
        found.append((sum(sent), sum(came), kept + peak.most))
    return found
