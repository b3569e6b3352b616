"""What ranks run in the tests of a model over several processes."""

import importlib.util
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tilewise.parallel import ContextPlan

FILE = Path(__file__).parent.parent.parent / "examples" / "train_long_context.py"
LETTERS, TOKENS, BATCH = 40, 97, 2


def example():
    spec = importlib.util.spec_from_file_location("train_long_context", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(group, sharded, checkpointed, sparse):
    """Each parameter's gradient, of a batch whose entries two pairs of processes share where there are four."""
    module = example()
    torch.manual_seed(0)
    model = module.LanguageModel(LETTERS, sparse)
    pieces = torch.randint(LETTERS, (BATCH, TOKENS + 1))
    total = pieces[:, 1:].numel()
    if sharded:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        plan = ContextPlan(mesh["context"], seq_len=TOKENS)
        pieces = pieces[mesh["data"].get_local_rank()][None]
        # All four hold parts of every parameter.
        flat = mesh._flatten()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=flat)
    else:
        plan = ContextPlan(group, seq_len=TOKENS)
    if checkpointed:
        for block in model.blocks:
            block.forward = checkpointing(block.forward)
    # loss_of divides by the letters of the pieces that it sees.
    loss = module.loss_of(model, pieces, plan) * (pieces[:, 1:].numel() / total)
    if sharded:
        # FSDP averages over its processes.
        loss = loss * flat.size()
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    if sharded:
        return {name: x.full_tensor() for name, x in found.items()}
    for x in found.values():
        dist.all_reduce(x, group=group)
    return found


def checkpointing(forward):
    return lambda *arguments: checkpoint(forward, *arguments, use_reentrant=False)
