"""A kernel launch as a value: run it, compile it without a GPU, or audit it at sizes that no machine holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise import interpreter


@dataclass(frozen=True)
class Launch:
    """One kernel, its grid (the number of programs) and its arguments by name."""

    kernel: Any
    grid: int
    arguments: Mapping[str, Any]

    def run(self) -> None:
        """Launch on the current device; a grid of 0 programs launches nothing."""
        if self.grid:
            self.kernel[(self.grid,)](**self.arguments)


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run launches in order on `device`: compiled on a GPU, interpreted on the CPU."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            for launch in launches:
                launch.run()
    else:
        interpreter.repair()
        with interpreter.quiet():
            for launch in launches:
                launch.run()


def padded_channels(channels: int) -> int:
    """Channels as a tile holds them: a power of two, at least the 16 that a matrix product wants."""
    return max(16, triton.next_power_of_2(channels))


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides over (batch, token, head) of `[B, T, H, D]`, or of packed `[N, H, D]`, which has no batch axis."""
    if x.dim() == 3:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0), x.stride(1), x.stride(2)


def fits_descriptor(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read dense `[B, T, H, D]` as it lies: 16-byte aligned in every axis, and not empty."""
    size = x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])
    return x.dim() == 4 and aligned and x.numel() > 0


def descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor over `[B, H, T, D]` of a dense `[B, T, H, D]` tensor, for tiles of `rows` tokens and `columns` channels of one head."""
    batch, tokens, heads, channels = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    return TensorDescriptor(x, [batch, heads, tokens, channels], [stride_b, stride_h, stride_t, 1], [1, 1, rows, columns])
