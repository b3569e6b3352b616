"""The CUDA backend: arithmetic in Triton kernels of our own, attention by tilewise's flash launcher.

Torch serves for device memory, shapes and views; a tensor of torch's is what this backend calls an array. Where there
is no GPU it works
interpreted only: kernels run through Triton's interpreter, on the host's memory.
"""

from typing import Any

import torch

from mytorch.backends.gpu.elementwise import Elementwise
from mytorch.backends.gpu.image import Image
from mytorch.backends.gpu.index import Index
from mytorch.backends.gpu.launcher import Array, Plan
from mytorch.backends.gpu.matrix import Matrix
from mytorch.backends.gpu.optimiser import Optimiser
from mytorch.backends.gpu.rows import Rows
from mytorch.backends.words import WordsAreNoMethods
from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.program import run_repeated
from tilewise.ops.flash import launch as flash

# Of a head, in the attention kernels.
MOST_CHANNELS = 256


def find_device() -> torch.device:
    """Where arrays live: the GPU, or the host's memory where kernels are interpreted."""
    if interpreting():
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    raise RuntimeError(
        "Device.CUDA needs a GPU and torch sees none: use Device.CPU, or have Triton's interpreter run the kernels"
        " (slowly) by setting TRITON_INTERPRET=1 in the environment before Python starts"
    )


class CudaBackend(Elementwise, Matrix, Rows, Index, Image, Optimiser, WordsAreNoMethods):
    """The protocol of `base.Backend` on a GPU.

    A device may be given: `meta`, to collect launches that are compiled and not run.
    """

    name = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or find_device()

    def _launch(self, plan: Plan, **arrays: Any) -> None:
        run_repeated(plan.launch, arrays, self.device)

    def attention(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
        return flash.forward(self._attention_inputs(q, k, v, causal, scale))

    def attention_grad(
        self, grad: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        return flash.backward(
            self._attention_inputs(q, k, v, causal, scale), output, lse, self._rows_in_order(grad), None
        )

    def _attention_inputs(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> flash.Inputs:
        if q.dtype not in (torch.float16, torch.float32):
            raise TypeError(
                f"attention on CUDA takes fp16 and fp32, not {self.dtype(q)}: convert with astype, or compute on"
                " Device.CPU"
            )
        if max(q.shape[-1], v.shape[-1]) > MOST_CHANNELS:
            raise ValueError(
                f"attention on CUDA takes at most {MOST_CHANNELS} channels a head, not {q.shape[-1]} and {v.shape[-1]}:"
                " use more heads, or Device.CPU"
            )
        q, k, v = self._rows_in_order(q), self._rows_in_order(k), self._rows_in_order(v)
        return flash.make_inputs(q, k, v, None, None, causal, -1, -1, scale, 0.0)

    def _rows_in_order(self, x: Array) -> Array:
        """x, copied where the kernels could not read it: they need each row's elements contiguous."""
        return x if x.stride(-1) == 1 else self.copy(x)
