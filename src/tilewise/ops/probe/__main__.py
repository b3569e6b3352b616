"""`python -m tilewise.ops.probe`: prints the probe's error. A process of its own, for wrong code may end it."""

import torch

from tilewise.ops.probe.launch import transposed_product_error

print(transposed_product_error(torch.device("cuda")))
