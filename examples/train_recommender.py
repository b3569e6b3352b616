"""A small sequential recommender of HSTULayers, with dense attention and with block-sparse attention, against what is
popular.

python examples/train_recommender.py                     # two to three minutes of one CPU core
python examples/train_recommender.py --device cuda --users 20000

Needs the extra `dev` (rich, typer). It makes up its own users. Items belong to interests, and within an interest an
item is followed by one of three others. A user has three interests, and goes to and fro between them: the next item of
an interest follows the last one of that interest, which may lie a while back. Now and then something popular comes
between. What a user takes last is held out; it is a hit if it is among the ten recommended.
"""

import itertools
import random
import time
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

from tilewise.nn import HSTULayer

INTERESTS, ITEMS_EACH = 20, 20
ITEMS = INTERESTS * ITEMS_EACH
SHORTEST, LONGEST = 40, 96
# How likely it is that a user takes something popular, or goes on with the same interest; and which of its three
# successors follows an item.
POPULAR, SAME = 0.15, 0.5
SUCCESSORS = (0.6, 0.3, 0.1)
WIDTH, LAYERS, HEADS, BATCH = 64, 2, 2, 32
# A query of the block-sparse model sees 24 keys of chosen blocks, its 16 last ones and the means of all blocks, not up
# to 94 keys.
SPARSE = {"block_counts": 3, "block_size": 8, "window_size": 16}
TOP = 10


def make_histories(users: int, seed: int) -> list[list[int]]:
    """What each user takes, in order: items 0 to ITEMS - 1."""
    rng = random.Random(seed)
    followers = [
        rng.sample([i for i in range(ITEMS_EACH) if i != item % ITEMS_EACH], len(SUCCESSORS)) for item in range(ITEMS)
    ]
    by_popularity = rng.sample(range(ITEMS), ITEMS)
    popularity = list(itertools.accumulate(1 / (rank + 1) for rank in range(ITEMS)))
    histories = []
    for _ in range(users):
        interests = rng.sample(range(INTERESTS), 3)
        last = {interest: rng.randrange(ITEMS_EACH) for interest in interests}
        current, history = interests[0], []
        for _ in range(rng.randint(SHORTEST, LONGEST)):
            if rng.random() < POPULAR:
                history.append(rng.choices(by_popularity, cum_weights=popularity)[0])
                continue
            current = current if rng.random() < SAME else rng.choice(interests)
            (last[current],) = rng.choices(followers[current * ITEMS_EACH + last[current]], SUCCESSORS)
            history.append(current * ITEMS_EACH + last[current])
        histories.append(history)
    return histories


def pack(histories: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All items end to end [N], and the offsets [B + 1] of the histories."""
    items = torch.tensor([item for history in histories for item in history], device=device)
    offsets = torch.tensor([0, *itertools.accumulate(map(len, histories))], device=device)
    return items, offsets


def batches(histories: list[list[int]]) -> list[list[list[int]]]:
    return [histories[start : start + BATCH] for start in range(0, len(histories), BATCH)]


class Recommender(nn.Module):
    """Packed items [N] with offsets [B + 1] -> scores of all items for the next one [N, ITEMS]."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        sizes = SPARSE if attention == "block-sparse" else {}
        self.layers = nn.ModuleList(
            HSTULayer(WIDTH, HEADS, attention=attention, dropout=0.1, **sizes) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.items, self.positions):
            nn.init.normal_(embedding.weight, std=WIDTH**-0.5)

    def forward(self, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        starts = offsets[:-1].repeat_interleave(offsets.diff(), output_size=len(items))
        x = self.items(items) + self.positions(torch.arange(len(items), device=items.device) - starts)
        for layer in self.layers:
            x = layer(x, offsets, max_seq_len=LONGEST)
        return self.norm(x) @ self.items.weight.T


@dataclass
class Run:
    """One model's training: its hit rate before the first epoch and after each, and the time."""

    attention: str
    model: Recommender
    hit_rates: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train(
    run: Run, histories: list[list[int]], epochs: int, seed: int, device: torch.device, progress: Progress
) -> None:
    """By all items but the first and the held-out one of each history, each from those before it."""
    task = progress.add_task(run.attention, total=epochs * len(batches(histories)), hit_rate=float("nan"))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3, weight_decay=0.01)
    rng = random.Random(seed)
    run.hit_rates.append(hit_rate(run.model, histories, device))
    for _ in range(epochs):
        start = time.perf_counter()
        for batch in batches(rng.sample(histories, len(histories))):
            items, offsets = pack([history[:-2] for history in batch], device)
            following, _ = pack([history[1:-1] for history in batch], device)
            loss = nn.functional.cross_entropy(run.model(items, offsets), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.update(task, advance=1)
        run.seconds += time.perf_counter() - start
        run.hit_rates.append(hit_rate(run.model, histories, device))
        progress.update(task, hit_rate=run.hit_rates[-1])


@torch.no_grad()
def hit_rate(model: Recommender, histories: list[list[int]], device: torch.device) -> float:
    """How often the held-out last item is among the best TOP."""
    model.eval()
    hits = 0
    for batch in batches(histories):
        items, offsets = pack([history[:-1] for history in batch], device)
        best = model(items, offsets)[offsets[1:] - 1].topk(TOP).indices
        held_out = torch.tensor([history[-1] for history in batch], device=device)
        hits += int((best == held_out[:, None]).sum())
    model.train()
    return hits / len(histories)


def popularity_hit_rate(histories: list[list[int]]) -> float:
    """The same for the TOP items that all users together take most often."""
    counts = torch.bincount(torch.tensor([item for history in histories for item in history[:-1]]), minlength=ITEMS)
    best = set(counts.topk(TOP).indices.tolist())
    return sum(history[-1] in best for history in histories) / len(histories)


def main(
    users: Annotated[int, typer.Option(min=1, help="How many users to make up.")] = 1000,
    epochs: Annotated[int, typer.Option(min=1, help="How often each model sees every user.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the users, the weights and the batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    console, place = Console(), torch.device(device)
    histories = make_histories(users, seed)
    popular = popularity_hit_rate(histories)
    runs = []
    for attention in ("dense", "block-sparse"):
        torch.manual_seed(seed)
        runs.append(Run(attention, Recommender(attention).to(place)))
    columns = (
        TextColumn("{task.description:>12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(f"hit rate @{TOP} {{task.fields[hit_rate]:.3f}}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for run in runs:
            train(run, histories, epochs, seed, place, progress)

    table = Table(
        title=(
            f"hit rate @{TOP} on the held-out last item: {users} users, {sum(map(len, histories))} interactions,"
            f" {ITEMS} items"
        )
    )
    for heading in ("epoch", *(run.attention for run in runs), "popularity"):
        table.add_column(heading, justify="right")
    for epoch in range(epochs + 1):
        table.add_row(str(epoch), *(f"{run.hit_rates[epoch]:.3f}" for run in runs), f"{popular:.3f}")
    table.add_section()
    table.add_row("seconds", *(f"{run.seconds:.0f}" for run in runs), "")
    console.print(table)


if __name__ == "__main__":
    # So small are the tensors that threads would mostly wait for each other.
    torch.set_num_threads(1)
    typer.run(main)
