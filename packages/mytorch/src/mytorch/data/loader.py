"""Batches of examples, in an order that a seed decides."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mytorch import random
from mytorch.data.dataset import Dataset
from mytorch.device import Device
from mytorch.tensor import Tensor


class DataLoader:
    """Iterating gives one epoch: batches of tensors, or of tuples of tensors, as the examples are.

    With `shuffle`, each epoch has another order; the same seed gives the same orders. Without a seed,
    `mytorch.manual_seed` decides. The last batch is smaller where the examples do not divide evenly, or left out with
    `drop_last`.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        device: Device | str = Device.CPU,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"DataLoader takes a Dataset, not {type(dataset).__name__}: wrap arrays in ArrayDataset, or subclass"
                " Dataset"
            )
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size is an integer of at least 1, not {batch_size!r}")
        self.dataset, self.batch_size, self.shuffle, self.drop_last, self.device = (
            dataset,
            batch_size,
            shuffle,
            drop_last,
            Device(device),
        )
        if seed is not None and seed < 0:
            raise ValueError(f"a seed is an integer of at least 0, not {seed!r}")
        self.seed = random.next_seed() if seed is None and shuffle else seed or 0
        # How many epochs were begun.
        self.epoch = 0

    def __len__(self) -> int:
        count = len(self.dataset)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)
        order = np.random.default_rng([self.seed, self.epoch]).permutation(count) if self.shuffle else np.arange(count)
        self.epoch += 1
        return self._batches(order.tolist())

    def _batches(self, order: list[int]) -> Iterator[Any]:
        for i in range(len(self)):
            batch = self.dataset.batch(order[i * self.batch_size : (i + 1) * self.batch_size])
            yield batch.to(self.device) if isinstance(batch, Tensor) else tuple(x.to(self.device) for x in batch)
