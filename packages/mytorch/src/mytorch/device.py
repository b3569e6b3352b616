"""Where a tensor's memory is."""

from enum import Enum


class Device(Enum):
    """The CPU, or the current CUDA GPU."""

    CPU = "cpu"
    CUDA = "cuda"

    def __str__(self) -> str:
        return self.value
