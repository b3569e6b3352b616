"""Linear regression with mytorch: the weights that made noisy data, found again by gradient descent.

python examples/mytorch_linear_regression.py             # two seconds

Needs the extra `examples`.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mytorch_common import Plot, Seed, console, draw, progress

import mytorch
from mytorch import data, nn, optim

WEIGHTS, BIAS, NOISE = (2.0, -3.4, 0.7), 4.2, 0.1
BATCH = 32


def make_data(count: int, seed: int) -> data.ArrayDataset:
    """Normal x [count, 3], and y [count, 1] = x · WEIGHTS + BIAS and noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count, len(WEIGHTS)))
    y = x @ np.array(WEIGHTS)[:, None] + BIAS + NOISE * rng.standard_normal((count, 1))
    return data.ArrayDataset(x.astype(np.float32), y.astype(np.float32))


def main(
    epochs: Annotated[int, typer.Option(min=1, help="How often every example is seen.")] = 20,
    seed: Seed = 0,
    plot: Plot = Path("loss.png"),
) -> None:
    mytorch.manual_seed(seed)
    loader = data.DataLoader(make_data(1000, seed), BATCH, shuffle=True)
    model, loss_of = nn.Linear(len(WEIGHTS), 1), nn.MSELoss()
    optimizer = optim.SGD(model.parameters(), lr=0.03)
    losses: list[float] = []
    with progress("linear regression", epochs * len(loader), losses) as report:
        for _ in range(epochs):
            for x, y in loader:
                loss = loss_of(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report(loss.item())

    found = [*model.weight.numpy()[:, 0], model.bias.item()]
    for name, value, true in zip(("w0", "w1", "w2", "bias"), found, (*WEIGHTS, BIAS), strict=True):
        console.print(f"{name:>4}: {value:+.3f} found, {true:+.3f} true")
    console.print(
        f"largest error: {max(abs(value - true) for value, true in zip(found, (*WEIGHTS, BIAS), strict=True)):.4f}"
    )
    draw(losses, plot, "Linear regression")


if __name__ == "__main__":
    typer.run(main)
