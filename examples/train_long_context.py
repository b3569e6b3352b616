"""A small language model on a context that several processes share, letter by letter: each has a part of every
sequence, and attention sees all of it.

torchrun --nproc-per-node 2 examples/train_long_context.py              # gloo, on a CPU
torchrun --nproc-per-node 8 examples/train_long_context.py --context 131072     # NCCL, where there are GPUs
python examples/train_long_context.py                                   # one process: the same curve

With --sparse attention is native sparse attention, with learned compression.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tilewise import flash_attention
from tilewise.nn import NativeSparseAttention
from tilewise.nn.rotary import rotate
from tilewise.parallel import ContextPlan

TEXT = Path(__file__).parent / "data" / "alice.txt"
DIM, LAYERS, HEADS, KV_HEADS = 64, 2, 4, 2
SPARSE = {
    "compress_size": 16,
    "compress_stride": 8,
    "block_size": 16,
    "block_count": 4,
    "window_size": 32,
    "compression": "learned",
}


class Dense(nn.Module):
    """Flash attention around rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(DIM, DIM, bias=False)
        self.to_kv = nn.Linear(DIM, 2 * KV_HEADS * DIM // HEADS, bias=False)
        self.to_out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, *, parallel: ContextPlan) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (HEADS, -1))
        k, v = self.to_kv(x).unflatten(-1, (2, KV_HEADS, -1)).unbind(-3)
        q, k = (rotate(part, parallel.position_ids, 10000.0) for part in (q, k))
        return self.to_out(flash_attention(q, k, v, causal=True, parallel=parallel).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP, each with a residual: of a rank's own tokens but for the attention."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.norm, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = NativeSparseAttention(DIM, HEADS, KV_HEADS, **SPARSE) if sparse else Dense()
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        x = x + self.attention(self.norm(x), parallel=plan)
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(nn.Module):
    """A rank's letters [B, T_local] -> logits of the next ones."""

    def __init__(self, letters: int, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, DIM)
        self.blocks = nn.ModuleList(Block(sparse) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, letters)

    def forward(self, letters: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
        x = self.embedding(letters)
        for block in self.blocks:
            x = block(x, plan)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, pieces: torch.Tensor, plan: ContextPlan) -> torch.Tensor:
    """This rank's part of the mean cross entropy of pieces [B, T + 1]: the sum over ranks is the whole."""
    letters, targets = plan.shard(pieces[:, :-1], 1), plan.shard(pieces[:, 1:], 1)
    total = nn.functional.cross_entropy(model(letters, plan).flatten(0, 1), targets.flatten(), reduction="sum")
    return total / pieces[:, 1:].numel()


def train(text: torch.Tensor, context: int, batch: int, steps: int, sparse: bool) -> list[float]:
    """The loss at each step; every rank has the same weights and draws the same pieces."""
    torch.manual_seed(0)
    model = LanguageModel(int(text.max()) + 1, sparse).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = ContextPlan(dist.group.WORLD, seq_len=context)
    losses = []
    for step in range(steps):
        first = torch.randint(len(text) - context, (batch, 1)).to(text.device)
        loss = loss_of(model, text[first + torch.arange(context + 1, device=text.device)], plan)
        optimizer.zero_grad()
        loss.backward()
        # Gradients of parameters are partial on each rank, as is the loss.
        for x in [loss.detach(), *(parameter.grad for parameter in model.parameters())]:
            dist.all_reduce(x)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: {losses[-1]:.6f} nats a letter", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--sparse", action="store_true", help="native sparse attention in place of flash attention")
    parser.add_argument("--losses", type=Path, help="write one loss a line")
    options = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpus else "gloo")
    else:
        dist.init_process_group("nccl" if on_gpus else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    letters = TEXT.read_text(encoding="utf-8")
    numbers = {letter: i for i, letter in enumerate(sorted(set(letters)))}
    text = torch.tensor([numbers[letter] for letter in letters], device="cuda" if on_gpus else "cpu")
    if options.context >= len(text):
        # A text of this length would be read from files; here it is repeated.
        text = text.repeat(-(-2 * options.context // len(text)))
    losses = train(text, options.context, options.batch, options.steps, options.sparse)
    if dist.get_rank() == 0:
        print(f"step {options.steps - 1}: {losses[-1]:.6f} nats a letter")
        if options.losses:
            options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
    # gloo aborts now and then where a cycle of references still holds a group when Python ends.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
