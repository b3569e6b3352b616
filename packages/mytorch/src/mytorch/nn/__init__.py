"""Layers, models of them, and losses.

>>> from mytorch import nn
>>> nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
Sequential(
  0: Linear(64, 32)
  1: ReLU()
  2: Linear(32, 10)
)
"""

from mytorch.nn.attention import MultiHeadAttention, TransformerBlock
from mytorch.nn.layers import (
    GELU,
    Conv2D,
    Dropout,
    Embedding,
    Flatten,
    LayerNorm,
    Linear,
    MaxPool2D,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
)
from mytorch.nn.losses import BCELoss, CrossEntropyLoss, MSELoss
from mytorch.nn.module import Module

__all__ = [
    "GELU",
    "BCELoss",
    "Conv2D",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "MaxPool2D",
    "Module",
    "MultiHeadAttention",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "TransformerBlock",
]
