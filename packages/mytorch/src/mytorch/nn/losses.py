"""What training makes small."""

from mytorch import dtypes
from mytorch.nn.module import Module
from mytorch.tensor import Tensor


class MSELoss(Module):
    """The mean of the squared differences of two tensors of one shape."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """As the class says."""
        if prediction.shape != target.shape:
            raise ValueError(
                f"MSELoss wants two tensors of one shape, got {list(prediction.shape)} and {list(target.shape)}:"
                " reshape one of them"
            )
        difference = prediction - target
        return (difference * difference).mean()


class CrossEntropyLoss(Module):
    """The mean of -log softmax(logits) at the right class: logits `[..., classes]`, targets int64 `[...]`."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As the class says."""
        if not logits.shape or targets.shape != logits.shape[:-1] or targets.dtype != dtypes.int64:
            raise ValueError(
                "CrossEntropyLoss wants logits [..., classes] and int64 targets [...], "
                f"got {list(logits.shape)} and {targets.dtype} {list(targets.shape)}"
            )
        return -logits.log_softmax().gather(-1, targets.reshape(*targets.shape, 1)).mean()
