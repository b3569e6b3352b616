"""What mytorch's examples share: a progress bar that keeps the losses, and the picture of them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mytorch import Device

# Options that mean the same in every example.
Seed = Annotated[int, typer.Option(help="Of the data, the weights and the order.")]
Plot = Annotated[Path, typer.Option(help="Where the loss curve goes.")]
Place = Annotated[Device, typer.Option(help="Where to compute.")]

console = Console()


@contextlib.contextmanager
def progress(name: str, steps: int, losses: list[float]) -> Iterator[Callable[[float], None]]:
    """A bar of `steps` steps; yields the function to call with each step's loss, which adds it to `losses`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps, loss=float("nan"))

        def report(loss: float) -> None:
            losses.append(loss)
            bar.update(task, advance=1, loss=loss)

        yield report


def draw(losses: list[float], file: Path, title: str) -> None:
    """The loss of each step, and its mean over the steps around it."""
    reach = len(losses) // 50
    around = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, linewidth=0.8, alpha=0.4, label="each step")
    axes.plot(steps, [sum(part) / len(part) for part in around], linewidth=1.5, label=f"mean of {2 * reach + 1}")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    console.print(f"loss curve: {file}", highlight=False, soft_wrap=True)
