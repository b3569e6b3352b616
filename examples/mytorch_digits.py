"""Handwritten digits with mytorch: a convolutional network, or one of linear layers.

python examples/mytorch_digits.py                          # the CNN on scikit-learn's 1,797 digits of 8 × 8: about ten
seconds of two CPU cores python examples/mytorch_digits.py --model mlp
python examples/mytorch_digits.py --mnist FOLDER --epochs 2       # MNIST's four IDX files, compressed or not

Needs the extra `examples`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from mytorch_common import Place, Plot, Seed, console, draw, progress
from sklearn.datasets import load_digits

import mytorch
from mytorch import Device, data, nn, optim

BATCH, HELD_OUT = 64, 360
MNIST = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Kind(StrEnum):
    """Which network."""

    mlp = "mlp"
    cnn = "cnn"


def bundled(seed: int) -> tuple[data.ArrayDataset, data.ArrayDataset]:
    """scikit-learn's digits, shuffled: for training, and held out."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, classes = (digits.images[order, None] / 16).astype(np.float32), digits.target[order]
    return data.ArrayDataset(images[HELD_OUT:], classes[HELD_OUT:]), data.ArrayDataset(
        images[:HELD_OUT], classes[:HELD_OUT]
    )


def mnist(folder: Path) -> tuple[data.ArrayDataset, data.ArrayDataset]:
    """MNIST's files, or others in its format: for training, and held out."""
    files = [folder / name if (folder / name).exists() else folder / f"{name}.gz" for name in MNIST]
    images, classes, held_out_images, held_out_classes = map(data.load_idx, files)
    for file, array, axes in zip(
        files, (images, classes, held_out_images, held_out_classes), (3, 1, 3, 1), strict=True
    ):
        if array.ndim != axes:
            raise ValueError(f"{file} must hold an array of {axes} axes, and its shape is {list(array.shape)}")
    first, second = ((x[:, None] / np.float32(255)).astype(np.float32) for x in (images, held_out_images))
    return data.ArrayDataset(first, classes), data.ArrayDataset(second, held_out_classes)


def network(kind: Kind, height: int, width: int) -> nn.Module:
    """Images [B, 1, height, width] -> logits [B, 10]."""
    if kind is Kind.mlp:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(height * width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    return nn.Sequential(
        nn.Sequential(nn.Conv2D(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2)),
        nn.Sequential(nn.Conv2D(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2D(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.25)),
        nn.Sequential(
            nn.Linear(32 * (height // 4) * (width // 4), 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        ),
    )


@mytorch.no_grad()
def accuracy(model: nn.Module, dataset: data.ArrayDataset, device: Device) -> float:
    """The share of images whose largest logit is the right one."""
    model.eval()
    right = sum(
        int((model(x).numpy().argmax(1) == y.numpy()).sum()) for x, y in data.DataLoader(dataset, 256, device=device)
    )
    model.train()
    return right / len(dataset)


def main(
    model: Annotated[Kind, typer.Option(help="Linear layers, or convolutions before them.")] = Kind.cnn,
    mnist_folder: Annotated[
        Path | None, typer.Option("--mnist", help="A folder with MNIST's IDX files, instead of scikit-learn's digits.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often every image is seen.")] = 40,
    seed: Seed = 0,
    device: Place = Device.CPU,
    plot: Plot = Path("loss.png"),
) -> None:
    mytorch.manual_seed(seed)
    images, held_out = bundled(seed) if mnist_folder is None else mnist(mnist_folder)
    loader = data.DataLoader(images, BATCH, shuffle=True, device=device)
    net, loss_of = network(model, *images.arrays[0].shape[2:]).to(device), nn.CrossEntropyLoss()
    optimizer = optim.AdamW(net.parameters(), lr=3e-3)
    schedule = optim.CosineSchedule(optimizer, epochs * len(loader))
    console.print(net, highlight=False)
    losses: list[float] = []
    with progress(model.value, epochs * len(loader), losses) as report:
        for _ in range(epochs):
            for x, y in loader:
                loss = loss_of(net(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                report(loss.item())
    console.print(f"accuracy on {len(held_out)} held-out digits: {accuracy(net, held_out, device):.2%}")
    draw(losses, plot, f"Handwritten digits, {model.value}")


if __name__ == "__main__":
    typer.run(main)
