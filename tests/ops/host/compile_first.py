"""Compiles a training step of flash attention in a fresh process, for tests/ops/host/test_compiling.py: what was
imported meanwhile, as JSON.
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

import tilewise
from tilewise.ops._host import backend, compiling, launching, start


class Driver:
    """A GPU that is none; without an import that a user's process would lack."""

    def __init__(self, architecture):
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device=None):
        return 0


def launches(architecture):
    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with launching.capture(architecture) as found:
        o = tilewise.flash_attention(q, q, q, causal=True)
        torch.autograd.grad(o, q, torch.empty_like(o))
    return found


if __name__ == "__main__":
    assert backend.HAS_TRITON
    found = {architecture: launches(architecture) for architecture in (80, 90)}
    before, errors = set(sys.modules), []
    for architecture, one in found.items():
        triton.runtime.driver.set_active(Driver(architecture))
        for launch in one:
            launch.kernel.device_caches.clear()
        compiling.compile_all(start.tasks(one), lambda _, error: errors.append(str(error or "")))
    print(json.dumps({"imported": sorted(set(sys.modules) - before), "errors": errors}))
