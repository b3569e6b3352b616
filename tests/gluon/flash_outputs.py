"""What the kernels for Hopper make of a dozen problems, on such a GPU and simulated.

`flash_outputs.py FILE.json`, on a machine with one, compares both; `flash_outputs.py FILE.pt` writes the tensors of
the machine that it runs on.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from tilewise import flash_attention, interpreter, workbench
from tilewise.ops._host.backend import as_if_on

CASES = (
    "B=2,T=200,H=2,D=64",
    "T=300,D=40,causal=true",
    "T=257,D=64,Dv=128,causal=true",
    "T=200,H=1,D=128",
    "T=300,H=1,D=128,causal=true",
    "T=300,H=6,Hk=2,D=64,causal=true",
    "T=200,H=1,D=256,causal=true",
    "T=300,H=1,D=64,window=100/20",
    "T=300,H=1,D=64,softcap=4.0,causal=true",
    "T=300,H=1,D=128,scale=-0.3,causal=true",
    "lengths=130/0/257/1,H=2,Hk=1,D=128,causal=true",
    "lengths=150/40,lengths_k=100/300,H=3,Hk=1,D=128,Dv=64",
)
MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
Outputs = dict[tuple[str, str], dict[str, torch.Tensor]]


def outputs(case: str, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """By name, on the CPU."""
    problem = workbench.find("flash").load("suite").find(case).problem
    generator = torch.Generator().manual_seed(0)

    def drawn(_name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    given = {name: x.to(device) for name, x in problem.tensors(drawn).items()}
    learnt = {name: given[name].requires_grad_() for name in ("q", "k", "v")}
    o, lse = flash_attention(**given, **problem.options(), backend="triton", return_lse=True)
    upstream = torch.randn(o.shape, generator=generator).to(device, dtype)
    gradients = torch.autograd.grad(o, list(learnt.values()), upstream)
    found = {"o": o, "lse": lse} | {f"d{name}": x for name, x in zip(learnt, gradients, strict=True)}
    return {name: x.detach().cpu() for name, x in found.items()}


def all_outputs() -> Outputs:
    """Of every case in both dtypes; without a GPU as if on one of Hopper."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with contextlib.nullcontext() if device == "cuda" else as_if_on(90):
        found = {
            (case, str(dtype).removeprefix("torch.")): outputs(case, dtype, device)
            for case in CASES
            for dtype in (torch.float16, torch.bfloat16)
        }
    assert device == "cuda" or interpreter.simulated() > 0
    return found


def simulated() -> Outputs:
    """Those of a process that sees no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "simulated.pt"
        environment = os.environ | {
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": ":".join(sys.path),
        }
        subprocess.run([sys.executable, __file__, str(file)], check=True, env=environment)
        return torch.load(file)


def difference(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """How many numbers are the same bits, and how far the others lie apart at most, in roundings (half a step) of the
    largest number's.
    """
    assert torch.equal(x.isfinite(), y.isfinite())
    same = (x == y) | (x.isnan() & y.isnan())
    apart = torch.where(same, 0, x.double() - y.double()).abs().max().item()
    largest = x[x.isfinite()].abs().max().item()
    rounding = 2.0 ** (torch.tensor(largest).log2().floor().item() - MANTISSA[x.dtype] - 1)
    return {"same": round(same.double().mean().item(), 4), "roundings": round(apart / rounding, 2)}


def compared() -> dict[str, Any]:
    """The GPU's beside the simulation's."""
    measured, expected = all_outputs(), simulated()
    return {
        f"{case} {dtype}": {name: difference(x, expected[case, dtype][name]) for name, x in found.items()}
        for (case, dtype), found in measured.items()
    }


def main(place: str) -> None:
    """Write one or the other."""
    if place.endswith(".json"):
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "command": "python tests/gluon/flash_outputs.py FILE.json",
            "cases": compared(),
        }
        Path(place).write_text(json.dumps(result, indent=1) + "\n")
    else:
        torch.save(all_outputs(), place)


if __name__ == "__main__":
    main(sys.argv[1])
