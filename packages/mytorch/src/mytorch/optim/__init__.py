"""Optimisers, gradient clipping and a learning-rate schedule."""

from mytorch.optim.clip import clip_grad_norm
from mytorch.optim.optimizers import SGD, Adam, AdamW, Optimizer
from mytorch.optim.schedule import CosineSchedule

__all__ = ["SGD", "Adam", "AdamW", "CosineSchedule", "Optimizer", "clip_grad_norm"]
