"""The layers of one input: linear maps, convolution, pooling, activations, normalisation, embedding, and one after the
other.
"""

import math
from collections.abc import Iterator

from mytorch.arguments import Pair, pair
from mytorch.nn import initial
from mytorch.nn.module import Module
from mytorch.tensor import Tensor


class Linear(Module):
    """`x [..., inputs] @ weight [inputs, outputs] + bias [outputs]`."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        initial.check_sizes("Linear", inputs=inputs, outputs=outputs)
        self.weight = initial.kaiming_he((inputs, outputs), inputs)
        self.bias = initial.zeros(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.linear(self.weight, self.bias)

    def options(self) -> str:
        """Sizes, and whether there is a bias."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}" + (", bias=False" if self.bias is None else "")


class Conv2D(Module):
    """Images `[B, inputs, H, W]` with a weight `[outputs, inputs, h, w]` and a bias `[outputs]`; size, stride and
    padding by number or (h, w).
    """

    def __init__(
        self, inputs: int, outputs: int, size: Pair, *, stride: Pair = 1, padding: Pair = 0, bias: bool = True
    ) -> None:
        initial.check_sizes("Conv2D", inputs=inputs, outputs=outputs)
        window = pair(size, "size", 1)
        self.stride, self.padding = pair(stride, "stride", 1), pair(padding, "padding", 0)
        self.weight = initial.kaiming_he((outputs, inputs, *window), inputs * math.prod(window))
        self.bias = initial.zeros(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.conv2d(self.weight, self.bias, self.stride, self.padding)

    def options(self) -> str:
        """Sizes, stride, padding, and whether there is a bias."""
        outputs, inputs, *window = self.weight.shape
        said = f"{inputs}, {outputs}, {tuple(window)}"
        said += f", stride={self.stride}" if self.stride != (1, 1) else ""
        said += f", padding={self.padding}" if self.padding != (0, 0) else ""
        return said + (", bias=False" if self.bias is None else "")


class MaxPool2D(Module):
    """The largest of each window of images `[B, C, H, W]`; windows stand side by side unless a stride is given."""

    def __init__(self, size: Pair, stride: Pair | None = None) -> None:
        self.size = pair(size, "size", 1)
        self.stride = self.size if stride is None else pair(stride, "stride", 1)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.max_pool2d(self.size, self.stride)

    def options(self) -> str:
        """Size, and stride where it is another."""
        return f"{self.size}" + (f", stride={self.stride}" if self.stride != self.size else "")


class ReLU(Module):
    """The positive part."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.relu()


class GELU(Module):
    """GELU, in its tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.gelu()


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.silu()


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.sigmoid()


class Flatten(Module):
    """All axes but the first as one."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.flatten(1)


class Dropout(Module):
    """In training, 0 with probability p and the rest divided by 1 - p; after `eval()`, nothing."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"Dropout's p is a probability, not {p!r}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.dropout(self.p, self.training)

    def options(self) -> str:
        """The probability."""
        return f"{self.p}"


class LayerNorm(Module):
    """Mean 0 and variance 1 along the last axis, of length `width`, times a weight, plus a bias."""

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        initial.check_sizes("LayerNorm", width=width)
        self.weight, self.bias, self.eps = initial.ones(width), initial.zeros(width), eps

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.layer_norm(self.weight, self.bias, self.eps)

    def options(self) -> str:
        """The width."""
        return f"{len(self.weight)}"


class Embedding(Module):
    """int64 numbers `[...]` below `count` to rows `[..., width]` of a weight `[count, width]`."""

    def __init__(self, count: int, width: int) -> None:
        initial.check_sizes("Embedding", count=count, width=width)
        self.weight = initial.normal((count, width), 1.0)

    def forward(self, numbers: Tensor) -> Tensor:
        """As the class says."""
        return self.weight.embedding(numbers)

    def options(self) -> str:
        """Sizes."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Sequential(Module):
    """Modules in order, each on the result of the one before; named 0, 1 and so on."""

    def __init__(self, *modules: Module) -> None:
        for i, module in enumerate(modules):
            if not isinstance(module, Module):
                raise TypeError(
                    f"Sequential takes modules, and number {i} is {type(module).__name__}: wrap a function in a Module"
                )
            setattr(self, str(i), module)

    def __iter__(self) -> Iterator[Module]:
        return (part for name, part in vars(self).items() if name.isdigit())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, i: int) -> Module:
        return list(self)[i]

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        for module in self:
            x = module(x)
        return x
