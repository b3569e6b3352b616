"""Times mytorch on the CPU against torch with as many threads, in one run: a CNN's training step, start-up, attention
and its memory.

python benchmarks/mytorch_cpu.py --json benchmarks/results/mytorch-cpu.json

The calls that are compared take turns, and medians are compared. "speed" is torch's time over mytorch's: above 1,
mytorch is faster.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numba
import numpy as np
import torch
import typer
from cnn import mytorch_step, torch_step
from harness import Run

import mytorch
from mytorch import Device, Tensor
from tilewise.bench.timing import host_times

Calls = dict[str, Callable[[], object]]
# Batch, heads, tokens, channels.
ATTENTION = (1, 8, 4096, 64)
FIRST_RESULT = """
import time
start = time.perf_counter()
from mytorch import Tensor
x = Tensor.randn((512, 512), requires_grad=True)
(x.relu() * x).sum().backward()
assert x.grad.shape == (512, 512)
print(time.perf_counter() - start)
"""


def milliseconds(calls: Calls, rounds: int) -> dict[str, float]:
    """The median of each call, the calls taking turns, after one that does not count."""
    times = host_times(calls, "cpu", 1, rounds, warm_up=1)
    return {name: round(found["whole"] / 1e3, 3) for name, found in times.items()}


def cnn(rounds: int) -> dict[str, Any]:
    """The training step on both backends and in torch."""

    def on_backend(name: str) -> Callable[[], float]:
        step = mytorch_step(Device.CPU)

        def run() -> float:
            mytorch.set_cpu_backend(name)
            return step().item()

        return run

    in_torch = torch_step("cpu")
    steps = {"parallel": on_backend("parallel"), "serial": on_backend("serial"), "torch": lambda: in_torch().item()}
    losses = {name: step() for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        sys.exit(f"the three do not compute the same loss: {losses}")
    times = milliseconds(steps, rounds)
    speeds = {
        "parallel to torch": times["torch"] / times["parallel"],
        "parallel to serial": times["serial"] / times["parallel"],
    }
    speeds = {name: round(value, 2) for name, value in speeds.items()}
    return {"case": "training step of a CNN", "milliseconds": times, "speed": speeds}


def start_up() -> dict[str, Any]:
    """Seconds from `import mytorch` to a first result and its gradient in fresh processes: the first with no compiled
    code, then with it.
    """

    def seconds(environment: dict[str, str]) -> float:
        return float(
            subprocess.run(
                [sys.executable, "-c", FIRST_RESULT], env=environment, check=True, capture_output=True, text=True
            ).stdout
        )

    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        cold = seconds(environment)
        warm = statistics.median(seconds(environment) for _ in range(5))
    return {"case": "start-up", "seconds": {"cold": round(cold, 2), "warm": round(warm, 2)}}


def attention_calls(causal: bool) -> Calls:
    """Forward, and backward with the forward it needs."""
    batch, heads, tokens, channels = ATTENTION
    arrays = [
        np.random.default_rng(i).standard_normal((batch, tokens, heads, channels)).astype(np.float32) for i in range(4)
    ]
    ours = [Tensor.create(x, requires_grad=i < 3) for i, x in enumerate(arrays)]
    theirs = [torch.tensor(x).transpose(1, 2).contiguous().requires_grad_(i < 3) for i, x in enumerate(arrays)]

    def attend_torch() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*theirs[:3], is_causal=causal)

    def attend() -> Tensor:
        return ours[0].attention(*ours[1:3], causal=causal)

    with torch.no_grad():
        difference = np.abs(attend_torch().transpose(1, 2).numpy() - attend().numpy()).max()
    if difference > 1e-4:
        sys.exit(f"attention differs from torch's by {difference}")
    return {
        "mytorch forward": attend,
        "torch forward": attend_torch,
        "mytorch both": lambda: attend().backward(ours[3]),
        "torch both": lambda: attend_torch().backward(theirs[3]),
    }


def attention(rounds: int) -> list[dict[str, Any]]:
    """Against torch's scaled_dot_product_attention, with and without a causal mask; backward is both less forward."""
    mytorch.set_cpu_backend("parallel")
    found = []
    for name, causal in (("full", False), ("causal", True)):
        times = milliseconds(attention_calls(causal), rounds)
        for side in ("mytorch", "torch"):
            times[f"{side} backward"] = round(times[f"{side} both"] - times[f"{side} forward"], 3)
        speeds = {
            direction: round(times[f"torch {direction}"] / times[f"mytorch {direction}"], 2)
            for direction in ("forward", "backward", "both")
        }
        found.append({"case": f"attention, {name}", "milliseconds": times, "speed": speeds})
    return found


def peak() -> int:
    """The most memory this process has had, in KiB, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def growth(backend: str) -> int:
    """MiB by which this process's memory peaked in attention's forward and backward beyond what it had, gradients and
    result included.
    """
    mytorch.set_cpu_backend(backend)
    batch, heads, tokens, channels = ATTENTION
    small = Tensor.randn((batch, 64, heads, channels), requires_grad=True)
    small.attention(small, small).sum().backward()
    q, k, v, grad = (Tensor.randn((batch, tokens, heads, channels), requires_grad=True) for _ in range(4))
    before = peak()
    q.attention(k, v).backward(grad)
    return (peak() - before) // 1024


def memory() -> dict[str, Any]:
    """Both backends' growth, each in a process of its own; the serial one is the plain formula."""
    command = "import mytorch_cpu, sys; print(mytorch_cpu.growth(sys.argv[1]))"
    folder = Path(__file__).parent
    # The other process starts in another folder, and imports what this one can.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def measured(backend: str) -> int:
        return int(
            subprocess.run(
                [sys.executable, "-c", command, backend],
                cwd=folder,
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )

    found = {name: measured(backend) for name, backend in (("tiled", "parallel"), ("plain formula", "serial"))}
    return {"case": "attention's memory", "mebibytes": found}


def environment(threads: int) -> dict[str, str]:
    """What the figures depend on beyond versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "device": models[0] if models else platform.processor(),
        "numba": numba.__version__,
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "threading": numba.threading_layer(),
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def main(
    json_file: Annotated[Path | None, typer.Option("--json", help="where to save the figures")] = None,
    threads: Annotated[int, typer.Option(help="of mytorch and of torch")] = 2,
    rounds: Annotated[int, typer.Option(help="times each training step is taken; attention a tenth of it")] = 100,
) -> None:
    """Print the figures, and save them as JSON on request."""
    mytorch.set_num_threads(threads)
    torch.set_num_threads(threads)
    print("training step of a CNN", flush=True)
    training = cnn(rounds)
    # numba chooses its threading layer when it first runs something in parallel.
    run = Run("mytorch_cpu", json_file, f"--threads {threads} --rounds {rounds}", environment(threads))
    run.add(training)
    run.begin("start-up")
    run.add(start_up())
    run.begin("attention")
    for row in attention(max(3, rounds // 10)):
        run.add(row)
    run.begin("memory")
    run.add(memory())
    run.print_table()


if __name__ == "__main__":
    typer.run(main)
