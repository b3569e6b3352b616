"""Runs the probe."""

import torch

from tilewise.ops._host.launching import Launch, run_all
from tilewise.ops.probe.kernels import probe_transposed_product_kernel

BLOCK = 64
TILES = 4


def transposed_product_error(device: torch.device) -> float:
    """Relative error of the probe on `device`: some 1e-3 where the compiler is right, near 1 where it is not."""
    generator = torch.Generator().manual_seed(0)
    q, x = (torch.randn(TILES * BLOCK, BLOCK, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    k = torch.randn(BLOCK, BLOCK, generator=generator).to(device, torch.bfloat16)
    out = torch.empty(BLOCK, BLOCK, device=device)
    arguments = {"q": q, "k": k, "x": x, "out": out, "n_tiles": TILES, "BLOCK": BLOCK, "D": BLOCK, "num_warps": 4}
    run_all([Launch(probe_transposed_product_kernel, 1, arguments)], device)
    expected = (q.double() @ k.double().T).T @ x.double()
    return ((out.double() - expected).norm() / expected.norm()).item()
