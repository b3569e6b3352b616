"""The one guarded import of Gluon."""

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as TensorDescriptor
