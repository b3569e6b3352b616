"""A kernel launch as data: the kernel, its grid, its arguments, and the tensor descriptors among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.ops._host import gluon
from tilewise.ops._host.symbol import sample


class Descriptor(NamedTuple):
    """A tensor descriptor: how the tensor memory accelerator finds tiles of a block shape in `base`.

    With a layout it is Gluon's.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None

    def triton(self) -> Any:
        """As Triton's own launch path takes it."""
        shape, strides, block_shape = list(self.shape), list(self.strides), list(self.block_shape)
        if self.layout is None:
            return TensorDescriptor(self.base, shape, strides, block_shape)
        of_gluon: Any = gluon.TensorDescriptor
        return of_gluon(self.base, shape, strides, block_shape, self.layout)


@dataclass(slots=True)
class Launch:
    """One kernel, its grid (the number of programs) and its arguments by name."""

    kernel: Any
    grid: int
    arguments: Mapping[str, Any]

    def run(self) -> Any:
        """Launch on the current device and return the compiled kernel; a grid of 0 programs launches nothing and
        returns None.
        """
        return self.kernel[(self.grid,)](**self.for_triton().arguments) if self.grid else None

    def compile(self) -> Any:
        """The kernel compiled for this launch and the current device."""
        return self.kernel.warmup(grid=(self.grid,), **self.for_triton().arguments)

    def for_triton(self) -> "Launch":
        """The same with Triton's descriptors, and numbers in place of symbols."""
        numbers = {name: sample(x) for name, x in self.arguments.items()}
        arguments = {name: x.triton() if isinstance(x, Descriptor) else x for name, x in numbers.items()}
        return Launch(self.kernel, sample(self.grid), arguments)
