"""A probe of the compiler: does this Triton get products of tiles of different widths right?

`python -m tilewise.ops.probe.launch` prints the probe's error: in a separate process, since wrong code may crash it.
"""

import torch

from tilewise.ops._host.launching import Launch
from tilewise.ops._host.program import run_all
from tilewise.ops.probe.kernels import probe_mixed_widths_kernel

BLOCK = 64


def mixed_widths_error(device: torch.device) -> float:
    """Relative error of the probe on `device`: some 1e-3 where the compiler is right, about 1 or more
    where it is not.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, do, v = (torch.randn(BLOCK, BLOCK, generator=generator).to(device, torch.bfloat16) for _ in range(4))
    dq, dk = torch.empty(BLOCK, BLOCK, device=device), torch.empty(BLOCK, BLOCK, device=device)
    arguments = {
        "q": q,
        "k": k,
        "do": do,
        "v": v,
        "dq": dq,
        "dk": dk,
        "D": BLOCK,
        "BLOCK": BLOCK,
        "BLOCK_D": BLOCK // 2,
        "num_warps": 4,
    }
    run_all([Launch(probe_mixed_widths_kernel, 2, arguments)], device)
    scores = (do.double() @ v.double().T).to(torch.bfloat16).double()
    expected = torch.cat([scores @ k.double(), scores.T @ q.double()])
    return ((torch.cat([dq, dk]).double() - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    print(mixed_widths_error(torch.device("cuda")))
