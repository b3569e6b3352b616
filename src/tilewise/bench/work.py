"""What an operator's definition does on a case, counted."""

from dataclasses import dataclass

from tilewise.verify.problem import Tensors


@dataclass(frozen=True)
class Work:
    """Pairs of a query and a key, channels of both, bytes of inputs, of outputs and of the inputs that
    have gradients.
    """

    pairs: int = 0
    channels: int = 0
    values: int = 0
    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    def operations(self, mode: str, pairs: int | None) -> int:
        """A score and its use forward; backward the score again, and four products more.

        `pairs` are others than the operator's.
        """
        forward = 2 * (self.channels + self.values)
        backward = 2 * (3 * self.channels + 2 * self.values)
        return (self.pairs if pairs is None else pairs) * {
            "fwd": forward,
            "bwd": backward,
            "fwd+bwd": forward + backward,
        }[mode]

    def bytes(self, mode: str) -> int:
        """Each input read once and each output written once; backward both read, with the gradient that arrives, and
        gradients written.
        """
        forward = self.inputs + self.outputs
        backward = forward + self.outputs + self.gradients
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[mode]


def bytes_of(tensors: Tensors) -> int:
    """All elements of them."""
    return sum(x.numel() * x.element_size() for x in tensors.values())
