"""A transformer with mytorch that writes letter by letter, from Alice's Adventures in Wonderland.

python examples/mytorch_char_transformer.py                # one to two minutes of two CPU cores
python examples/mytorch_char_transformer.py --device cuda --steps 5000

Needs the extra `examples`.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mytorch_common import Place, Plot, Seed, console, draw, progress

import mytorch
from mytorch import Device, Tensor, nn, optim

TEXT = Path(__file__).parent / "data" / "alice.txt"
CONTEXT, BATCH = 64, 8
WIDTH, LAYERS, HEADS, KV_HEADS = 96, 2, 4, 2
PROMPT = "Alice was beginning to "


class Transformer(nn.Module):
    """Letters [B, T] as numbers -> logits of the next ones [B, T, letters]."""

    def __init__(self, letters: int) -> None:
        self.letters, self.positions = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerBlock(WIDTH, HEADS, kv_heads=KV_HEADS, causal=True) for _ in range(LAYERS))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.letters(letters) + self.positions(Tensor.arange(letters.shape[1], device=letters.device))
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: Transformer, pieces: np.ndarray, device: Device) -> Tensor:
    """Mean cross entropy, in nats a letter, of pieces [B, T + 1]."""
    return nn.CrossEntropyLoss()(
        model(Tensor.create(pieces[:, :-1], device=device)), Tensor.create(pieces[:, 1:], device=device)
    )


@mytorch.no_grad()
def evaluate(model: Transformer, text: np.ndarray, device: Device) -> float:
    """The loss over `text`, cut into pieces of CONTEXT letters."""
    count = (len(text) - 1) // CONTEXT
    pieces = text[np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)]
    batches = np.array_split(pieces, -(-count // BATCH))
    return sum(float(loss_of(model, batch, device).item()) * len(batch) for batch in batches) / count


@mytorch.no_grad()
def generate(model: Transformer, prompt: list[int], count: int, rng: np.random.Generator, device: Device) -> list[int]:
    """`prompt` and `count` letters more, drawn one by one from what the model expects after the last
    CONTEXT letters.
    """
    letters = list(prompt)
    for _ in range(count):
        logits = model(Tensor.create([letters[-CONTEXT:]], device=device))[0, -1]
        chances = (logits / 0.7).softmax().numpy().astype(np.float64)
        letters.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return letters


def main(
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 1000,
    sample: Annotated[int, typer.Option(min=0, help="Letters to write at the end.")] = 300,
    seed: Seed = 0,
    device: Place = Device.CPU,
    plot: Plot = Path("loss.png"),
) -> None:
    mytorch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    text = TEXT.read_text(encoding="ascii")
    alphabet = sorted(set(text))
    number = {letter: i for i, letter in enumerate(alphabet)}
    letters = np.array([number[letter] for letter in text])
    seen, held_out = np.split(letters, [len(letters) * 9 // 10])

    model = Transformer(len(alphabet)).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)
    schedule = optim.CosineSchedule(optimizer, steps, warmup_steps=steps // 10, minimum=3e-4)
    losses: list[float] = []
    with progress("transformer", steps, losses) as report:
        for _ in range(steps):
            first = rng.integers(len(seen) - CONTEXT, size=(BATCH, 1))
            loss = loss_of(model, seen[first + np.arange(CONTEXT + 1)], device)
            optimizer.zero_grad()
            loss.backward()
            optim.clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            report(float(loss.item()))

    console.rule("what it writes")
    written = generate(model, [number[letter] for letter in PROMPT], sample, rng, device)
    console.print("".join(alphabet[letter] for letter in written), markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(
        f"loss on held-out text: {evaluate(model, held_out, device):.3f} nats a letter, {losses[0]:.3f} on seen text at"
        " first"
    )
    draw(losses, plot, "Alice's Adventures in Wonderland, letter by letter")


if __name__ == "__main__":
    typer.run(main)
