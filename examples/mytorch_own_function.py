"""An operation of one's own in mytorch: softplus, log(1 + e^x), with its gradient, checked and then trained with.

python examples/mytorch_own_function.py                  # a few seconds

Needs the extra `examples`. A Function computes on arrays of a backend, through the backend's methods (see
mytorch/backends/base.py): what is written once runs on every device. Written for the CPU alone, it could use NumPy, for
a CPU array is a NumPy array.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mytorch_common import Plot, Seed, console, draw, progress

import mytorch
from mytorch import Function, Tensor, nn, optim


class Softplus(Function):
    """log(1 + e^x), computed as max(x, 0) + log(1 + e^-|x|), which overflows nowhere."""

    def _forward(self, x):
        b = self.backend
        self.save(x)
        positive = b.unary("relu", x)
        minus_size = b.binary("sub", x, b.binary("add", positive, positive))
        one = b.full((), 1, b.dtype(x))
        return b.binary("add", positive, b.unary("log", b.binary("add", one, b.unary("exp", minus_size))))

    def _backward(self, grad):
        (x,) = self.saved
        return self.backend.binary("mul", grad, self.backend.unary("sigmoid", x))


class SoftplusLayer(nn.Module):
    """The operation as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return Softplus().apply(x)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 1000,
    seed: Seed = 0,
    plot: Plot = Path("loss.png"),
) -> None:
    mytorch.manual_seed(seed)
    mytorch.gradcheck(lambda x: Softplus().apply(x), [Tensor.create(np.linspace(-30, 30, 13), requires_grad=True)])
    console.print("gradcheck: the gradient agrees with the function's differences")

    # sin(3x) from 128 points, by a network whose only non-linear part is the new operation.
    x = Tensor.create(np.linspace(-1, 1, 128), (128, 1), dtype="float32")
    y = Tensor.create(np.sin(3 * x.numpy()))
    model = nn.Sequential(nn.Linear(1, 32), SoftplusLayer(), nn.Linear(32, 32), SoftplusLayer(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    schedule = optim.CosineSchedule(optimizer, steps)
    losses: list[float] = []
    with progress("sin(3x)", steps, losses) as report:
        for _ in range(steps):
            loss = nn.MSELoss()(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            report(loss.item())
    console.print(f"mean squared error: {losses[-1]:.6f}, {losses[0]:.4f} at first")
    draw(losses, plot, "sin(3x) with a softplus of one's own")


if __name__ == "__main__":
    typer.run(main)
