"""Numbered examples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mytorch.tensor import Tensor


class Dataset:
    """Examples by number.

    A subclass implements `__len__` and `__getitem__`; an example is a number, an array, a tensor, or a tuple of these.
    """

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must implement __len__(self)")

    def __getitem__(self, i: int) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must implement __getitem__(self, i)")

    def batch(self, numbers: Sequence[int]) -> Tensor | tuple[Tensor, ...]:
        """Several examples, stacked along a new first axis. A subclass that has a faster way may override it."""
        examples = [self[i] for i in numbers]
        if isinstance(examples[0], tuple):
            return tuple(stacked(part) for part in zip(*examples, strict=True))
        return stacked(examples)


def stacked(values: Sequence[Any]) -> Tensor:
    """Numbers, arrays or tensors of one shape as one tensor."""
    if not isinstance(values[0], Tensor | np.ndarray):
        return Tensor.create(list(values))
    arrays = [x.numpy() if isinstance(x, Tensor) else x for x in values]
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(
            "the examples of a batch must have one shape, got"
            f" {', '.join(sorted({str(list(x.shape)) for x in arrays}))}"
        )
    return Tensor.create(np.stack(arrays))


class ArrayDataset(Dataset):
    """Example i is the tuple of row i of each array or tensor; all have the same length."""

    def __init__(self, *arrays: np.ndarray | Tensor) -> None:
        self.arrays = [x.numpy() if isinstance(x, Tensor) else np.asarray(x) for x in arrays]
        if not arrays or any(x.ndim == 0 for x in self.arrays) or len({len(x) for x in self.arrays}) != 1:
            raise ValueError(
                "ArrayDataset wants arrays of one length, got shapes"
                f" {', '.join(str(list(x.shape)) for x in self.arrays) or 'none'}"
            )

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return tuple(x[i] for x in self.arrays)

    def batch(self, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        """Rows of each array, taken at once."""
        return tuple(Tensor.create(x[list(numbers)]) for x in self.arrays)
