"""What training makes small."""

from mytorch import dtypes
from mytorch.device import Device
from mytorch.nn.module import Module
from mytorch.ops.loss import BinaryCrossEntropy
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


class BCELoss(Module):
    """Binary cross-entropy: the mean of -(target * log p + (1 - target) * log(1 - p)) for probabilities p, as `Sigmoid`
    gives them, and targets in [0, 1], both of one shape.

    As in torch no logarithm is below -100: a p of exactly 0 or 1 gives a finite loss.
    """

    def forward(self, probabilities: Tensor, target: Tensor) -> Tensor:
        """As the class says."""
        p = probabilities
        if p.shape != target.shape or not dtypes.is_float(p.dtype):
            raise ValueError(
                "BCELoss wants floating-point probabilities and a target of their shape, got"
                f" {p.dtype} {list(p.shape)} and {list(target.shape)}: reshape one of them"
            )
        # On CUDA asking would wait for the device: there the logarithm gives NaN.
        if p.size and p.device is Device.CPU:
            least, most = -(-p.detach()).max().item(), p.detach().max().item()
            if not (least >= 0 and most <= 1):
                raise ValueError(
                    f"BCELoss wants probabilities from 0 to 1, got numbers from {least:g} to {most:g}: put a Sigmoid"
                    " before it"
                )
        return BinaryCrossEntropy().apply(p, target.astype(p.dtype)).mean()


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
