"""A small language model, letter by letter, with native sparse attention, and the same model with dense attention
beside it.

python examples/train_language_model.py                     # some three minutes of one CPU core
python examples/train_language_model.py --device cuda --steps 1000

Needs the extra `dev` (rich, typer, matplotlib). A query of the sparse model sees its 64 best keys, its 32 last ones and
31 windows, not all 256.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from tilewise import flash_attention
from tilewise.nn import NativeSparseAttention
from tilewise.nn.rotary import rotate

TEXT = Path(__file__).parent / "data" / "alice.txt"
CONTEXT, BATCH = 256, 8
DIM, LAYERS, HEADS, KV_HEADS = 128, 2, 4, 1
SPARSE = {
    "compress_size": 16,
    "compress_stride": 8,
    "block_size": 16,
    "block_count": 4,
    "window_size": 32,
    "init_blocks": 1,
    "local_blocks": 1,
}
PROMPT = "Alice was beginning to "


class DenseAttention(nn.Module):
    """What NativeSparseAttention is without its branches: every key before the query, through flash_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(DIM, DIM, bias=False)
        self.to_kv = nn.Linear(DIM, 2 * KV_HEADS * DIM // HEADS, bias=False)
        self.to_out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.to_q(x).unflatten(-1, (HEADS, -1))
        k, v = self.to_kv(x).unflatten(-1, (2, KV_HEADS, -1)).unbind(-3)
        positions = torch.arange(x.shape[1], device=x.device)
        q, k = (rotate(part, positions, 10000.0) for part in (q, k))
        return self.to_out(flash_attention(q, k, v, causal=True).flatten(-2))


class Block(nn.Module):
    """Attention, then an MLP, each with a residual."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.attention = NativeSparseAttention(DIM, HEADS, KV_HEADS, **SPARSE) if sparse else DenseAttention()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._mix(x, self.attention(self.norm_attention(x)))

    def step(self, x: torch.Tensor, cache) -> torch.Tensor:
        return self._mix(x, self.attention.step(self.norm_attention(x), cache))

    def _mix(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = x + attended
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(nn.Module):
    """Letters [B, T] -> logits of the next ones [B, T, letters]."""

    def __init__(self, letters: int, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, DIM)
        self.blocks = nn.ModuleList(Block(sparse) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, letters)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.embedding(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def init_caches(self, batch: int, max_len: int) -> list:
        return [block.attention.init_cache(batch, max_len) for block in self.blocks]

    @torch.no_grad()
    def step(self, letters: torch.Tensor, caches: list) -> torch.Tensor:
        """The same for new letters alone; what came before is in the caches."""
        x = self.embedding(letters)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block.step(x, cache)
        return self.head(self.norm(x))


@dataclass
class Run:
    """One model's training: its loss at each step, then its loss on text it has not seen, and the time."""

    name: str
    model: LanguageModel
    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0
    seconds: float = 0.0


def loss_of(model: LanguageModel, pieces: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in nats a letter, of pieces [B, T + 1]."""
    return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(run: Run, text: torch.Tensor, steps: int, seed: int, progress: Progress) -> None:
    task = progress.add_task(run.name, total=steps, loss=float("nan"))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3, weight_decay=0.01)
    # A warm-up, then down to a tenth.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1, final_div_factor=0.4
    )
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(steps):
        first = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator).to(text.device)
        loss = loss_of(run.model, text[first + torch.arange(CONTEXT + 1, device=text.device)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.losses.append(loss.item())
        progress.update(task, advance=1, loss=run.losses[-1])
    run.seconds = time.perf_counter() - start


@torch.no_grad()
def evaluate(model: LanguageModel, text: torch.Tensor) -> float:
    """The loss over `text`, cut into pieces of CONTEXT letters."""
    pieces = text.unfold(0, CONTEXT + 1, CONTEXT)
    losses = [loss_of(model, batch) * len(batch) for batch in pieces.split(BATCH)]
    return (sum(losses) / len(pieces)).item()


def generate(model: LanguageModel, prompt: list[int], count: int, seed: int, device: torch.device) -> list[int]:
    """`prompt` and `count` letters more, drawn one by one; each step reads the caches, not the text again."""
    generator = torch.Generator().manual_seed(seed)
    caches = model.init_caches(1, len(prompt) + count)
    letters, new = list(prompt), prompt
    for _ in range(count):
        logits = model.step(torch.tensor([new], device=device), caches)[0, -1]
        new = [int(torch.multinomial(torch.softmax(logits.cpu() / 0.7, -1), 1, generator=generator))]
        letters += new
    return letters


def draw(runs: list[Run], file: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(
            range(1, len(run.losses) + 1), run.losses, label=f"{run.name} (held out: {run.held_out:.2f})", linewidth=1
        )
    axes.set(xlabel="step", ylabel="loss, nats a letter", title="Alice's Adventures in Wonderland, letter by letter")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 250,
    seed: Annotated[int, typer.Option(help="Of the weights, the batches and the sample.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    plot: Annotated[Path, typer.Option(help="Where the loss curves go.")] = Path("loss.png"),
) -> None:
    console, place = Console(), torch.device(device)
    text = TEXT.read_text(encoding="ascii")
    alphabet = sorted(set(text))
    number = {letter: i for i, letter in enumerate(alphabet)}
    letters = torch.tensor([number[letter] for letter in text], device=place)
    seen, held_out = letters[: len(text) * 9 // 10], letters[len(text) * 9 // 10 :]

    runs = []
    for name, sparse in (("native sparse", True), ("dense", False)):
        torch.manual_seed(seed)
        runs.append(Run(name, LanguageModel(len(alphabet), sparse).to(place)))
    columns = (
        TextColumn("{task.description:>13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for run in runs:
            train(run, seen, steps, seed, progress)
            run.held_out = evaluate(run.model, held_out)

    table = Table(title=f"{CONTEXT} letters of context, {LAYERS} layers of {DIM} channels, batches of {BATCH}")
    for heading in ("attention", "steps", "first loss", "loss on held-out text", "seconds"):
        table.add_column(heading, justify="left" if heading == "attention" else "right")
    for run in runs:
        table.add_row(run.name, str(steps), f"{run.losses[0]:.2f}", f"{run.held_out:.3f}", f"{run.seconds:.0f}")
    console.print(table)

    sample = generate(runs[0].model, [number[letter] for letter in PROMPT], CONTEXT - len(PROMPT), seed, place)
    console.rule("the sparse model goes on, from its cache")
    console.print("".join(alphabet[letter] for letter in sample), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    draw(runs, plot)
    console.print(f"loss curves: {plot}", highlight=False)


if __name__ == "__main__":
    # So small are the tensors that threads would mostly wait for each other.
    torch.set_num_threads(1)
    typer.run(main)
