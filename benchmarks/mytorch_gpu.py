"""Times mytorch on a GPU against torch, in one run: a CNN's training step, and flash attention against the same
launcher under torch.

python benchmarks/mytorch_gpu.py --json benchmarks/results/mytorch-h200.json

The calls that are compared take turns, and medians are compared. "speed" is torch's time over mytorch's: above 1,
mytorch is faster. A step is small: what it takes is the host's work. A captured CUDA graph of it leaves the host out,
on either side.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from cnn import mytorch_step, torch_step
from harness import Run, need_gpu

import tilewise
from mytorch import Device, Tensor
from tilewise.bench.timing import captured, host_times

Calls = dict[str, Callable[[], object]]
# Calls between two looks at the clock, and how often they take turns.
RUNS, TURNS = 50, 7
# Batch, tokens, heads, channels.
ATTENTION = ((4, 4096, 16, 128), (8, 1024, 16, 64))


def milliseconds(calls: Calls, runs: int) -> dict[str, float]:
    """The median of each call, host and device both waited for, the calls taking turns, after one turn that does not
    count.
    """
    times = host_times(calls, "cuda", runs, TURNS, warm_up=runs)
    return {name: round(found["whole"] / 1e3, 4) for name, found in times.items()}


def cnn() -> dict[str, Any]:
    """The training step: mytorch and torch as called, and mytorch as a graph."""
    steps = {"mytorch": mytorch_step(Device.CUDA), "torch": torch_step("cuda")}
    # torch rounds what it convolves to TF32 unless told otherwise, mytorch never does: equal precision for the check,
    # torch's own choice when timed.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        losses = {name: [float(step().item()) for _ in range(20)] for name, step in steps.items()}
    if np.abs(np.subtract(*losses.values())).max() > 1e-3:
        sys.exit(f"the two do not compute the same losses: {losses}")
    calls: Calls = {**steps, "mytorch captured": captured(mytorch_step(Device.CUDA))}
    times = milliseconds(calls, RUNS)
    speeds = {name: round(times["torch"] / times[name], 2) for name in calls if name != "torch"}
    return {"case": "training step of a CNN", "milliseconds": times, "speed": speeds}


def attention(shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Forward, and forward with backward, causal, fp16: inside mytorch, and tilewise.flash_attention on torch's
    tensors.
    """
    arrays = [np.random.default_rng(i).standard_normal(shape).astype(np.float16) for i in range(4)]
    ours = [Tensor.create(x, requires_grad=i < 3, device=Device.CUDA) for i, x in enumerate(arrays)]
    theirs = [torch.tensor(x, device="cuda").requires_grad_(i < 3) for i, x in enumerate(arrays)]

    def attend() -> Tensor:
        return ours[0].attention(*ours[1:3], causal=True)

    def attend_torch() -> torch.Tensor:
        o = tilewise.flash_attention(*theirs[:3], causal=True)
        assert isinstance(o, torch.Tensor)
        return o

    if not np.array_equal(attend().numpy(), attend_torch().detach().cpu().numpy()):
        sys.exit("the same launcher gives different results")

    def both() -> None:
        attend().backward(ours[3])
        for x in ours[:3]:
            x.set_grad(None)

    times = milliseconds(
        {
            "mytorch forward": attend,
            "torch forward": attend_torch,
            "mytorch both": both,
            "torch both": lambda: torch.autograd.grad(attend_torch(), theirs[:3], theirs[3]),
        },
        20,
    )
    speeds = {
        direction: round(times[f"torch {direction}"] / times[f"mytorch {direction}"], 2)
        for direction in ("forward", "both")
    }
    name = "attention, B {}, T {}, H {}, D {}".format(*shape)
    return {"case": name, "shape": list(shape), "milliseconds": times, "speed": speeds}


def main(json_file: Annotated[Path | None, typer.Option("--json", help="where to save the figures")] = None) -> None:
    """Print the figures, and save them as JSON on request."""
    need_gpu()
    run = Run("mytorch_gpu", json_file)
    run.begin("training step of a CNN")
    run.add(cnn())
    for shape in ATTENTION:
        run.begin(f"attention, {shape}")
        run.add(attention(shape))
    run.print_table()


if __name__ == "__main__":
    typer.run(main)
