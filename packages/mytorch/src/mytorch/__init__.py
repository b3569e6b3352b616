"""A light deep-learning framework with a dynamic graph: parallel on the CPU, Triton on the GPU.

    >>> import mytorch
    >>> x = mytorch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    Tensor([2., 4., 6.], shape=[3], dtype=float32)

`import mytorch` needs NumPy alone: numba is imported by the first operation of the parallel backend, torch, triton
and tilewise by the first tensor on CUDA.
"""

from mytorch import data, nn, optim
from mytorch.autograd import Function, no_grad
from mytorch.backends import cpu_backend, get_num_threads, set_cpu_backend, set_num_threads
from mytorch.device import Device
from mytorch.dtypes import bool_, float16, float32, float64, int64
from mytorch.gradcheck import gradcheck
from mytorch.random import manual_seed
from mytorch.tensor import Tensor, tensor

cat, stack, einsum = Tensor.cat, Tensor.stack, Tensor.einsum

__version__ = "0.1.0"
__all__ = [
    "Device",
    "Function",
    "Tensor",
    "bool_",
    "cat",
    "cpu_backend",
    "data",
    "einsum",
    "float16",
    "float32",
    "float64",
    "get_num_threads",
    "gradcheck",
    "int64",
    "manual_seed",
    "nn",
    "no_grad",
    "optim",
    "set_cpu_backend",
    "set_num_threads",
    "stack",
    "tensor",
]
