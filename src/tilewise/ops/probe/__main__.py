"""`python -m tilewise.ops.probe`: prints the probe's error. In a separate process, since wrong code may crash it."""

import torch

from tilewise.ops.probe.launch import mixed_widths_error

print(mixed_widths_error(torch.device("cuda")))
