"""torch's global settings as verify needs them, whatever an implementation has set: the truth must not follow them."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Gradients on, autocast off, full precision products, fp32 and the CPU as defaults; all as before afterwards."""
    dtype, device, precision = torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_default_device(None if device.type == "cpu" else device)
            torch.set_float32_matmul_precision(precision)
