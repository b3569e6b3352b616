"""torch's global settings as verify needs them, whatever an implementation has set: the truth must not follow them."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_changing = threading.Lock()
_inside = 0
# What to put back, of those that were changed.
_before: dict[str, Any] = {}


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Gradients on, autocast off, full precision products, fp32 and the CPU as defaults; all as before afterwards.

    torch has one default dtype and one precision of products for all threads. So those are touched only where they are
    not what is wanted, by the first of several threads that are inside, and put back by the last.
    """
    device = torch.get_default_device()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_for_all_threads())
        # Of this thread.
        torch.set_default_device(None)
        try:
            yield
        finally:
            torch.set_default_device(None if device.type == "cpu" else device)


@contextlib.contextmanager
def _for_all_threads() -> Iterator[None]:
    global _inside
    with _changing:
        _inside += 1
        if torch.get_default_dtype() != torch.float32:
            _before.setdefault("dtype", torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if torch.get_float32_matmul_precision() != "highest":
            _before.setdefault("precision", torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with _changing:
            _inside -= 1
            if _inside == 0:
                if "dtype" in _before:
                    torch.set_default_dtype(_before["dtype"])
                if "precision" in _before:
                    torch.set_float32_matmul_precision(_before["precision"])
                _before.clear()
