"""`python -m tilewise.ops.probe`: prints the probe's error. A process of its own, for wrong code may end it."""

import torch

from tilewise.ops.probe.launch import mixed_widths_error

print(mixed_widths_error(torch.device("cuda")))
