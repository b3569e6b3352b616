"""Times flash attention, forward and backward, beside what a user would pick instead (cuDNN and FlashAttention-2
through torch), in one run.

python benchmarks/flash.py --json benchmarks/results/flash-h200.json
"""

import statistics
import time
from collections.abc import Callable
from math import nan

import torch
import triton
from timing import environment, save, where_to_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise

# (batch, tokens, heads, channels)
SHAPES = (
    (8, 2048, 16, 128), (1, 16384, 16, 128), (8, 2048, 32, 64), (1, 16384, 32, 64), (4, 4096, 48, 32), (4, 4096, 16,
    192), (4, 4096, 8, 256),
)  # fmt: skip
BASELINES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
# Ours, as called by default, and with dq summed in any order, which matters to the backward of Hopper's own kernels
# alone.
OURS, FREE = "tilewise", "tilewise free"
ROUNDS = 5


def operations(batch: int, tokens: int, heads: int, channels: int, causal: bool, direction: str) -> float:
    """4 · B · H · T² · D forward, half of it if causal; 2.5 times that backward."""
    forward = 4 * batch * heads * tokens**2 * channels * (0.5 if causal else 1.0)
    return forward * (1.0 if direction == "forward" else 2.5)


def attentions(causal: bool) -> dict[str, Callable[..., torch.Tensor]]:
    """Every implementation as a function of q, k, v in its own layout."""

    def through_torch(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=causal)

        return attend

    ours = {
        OURS: lambda q, k, v: tilewise.flash_attention(q, k, v, causal=causal),
        FREE: lambda q, k, v: tilewise.flash_attention(q, k, v, causal=causal, deterministic=False),
    }
    return ours | {name: through_torch(backend) for name, backend in BASELINES.items()}


def measure(shape: tuple[int, int, int, int], causal: bool) -> list[dict[str, object]]:
    """Median milliseconds of each implementation, the implementations taking turns."""
    batch, tokens, heads, channels = shape
    rows = []
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, attend in attentions(causal).items():
        layout = (batch, heads, tokens, channels) if name in BASELINES else (batch, tokens, heads, channels)
        q, k, v = (torch.randn(layout, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        try:
            o = attend(q, k, v)
            do = torch.randn_like(o)
            if name != FREE:
                calls["forward"][name] = lambda attend=attend, q=q, k=k, v=v: attend(q, k, v)
            torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
            calls["backward"][name] = lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(
                o, (q, k, v), do, retain_graph=True
            )
        except RuntimeError as error:
            # cuDNN through torch does not take every width.
            if name not in BASELINES or isinstance(error, torch.OutOfMemoryError):
                raise
    for direction, functions in calls.items():
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(ROUNDS):
            for name, function in functions.items():
                times[name].append(triton.testing.do_bench(function, warmup=10, rep=50, return_mode="median"))
        medians = {name: statistics.median(values) for name, values in times.items()}
        row: dict[str, object] = {
            "batch": batch,
            "tokens": tokens,
            "heads": heads,
            "channels": channels,
            "causal": causal,
            "direction": direction,
        }
        work = operations(*shape, causal, direction)
        row["milliseconds"] = {name: round(value, 4) for name, value in medians.items()}
        row["tflops"] = {name: round(work / value / 1e9, 1) for name, value in medians.items()}
        row["ratio"] = {name: round(medians[name] / medians[OURS], 3) for name in BASELINES if name in medians}
        if FREE in medians:
            row["ratio_free"] = {name: round(medians[name] / medians[FREE], 3) for name in BASELINES if name in medians}
        rows.append(row)
    return rows


def launch_overhead() -> dict[str, float]:
    """Microseconds of Python for one small forward call, the GPU left behind: inference, and with a graph for the
    backward.
    """
    q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)

    def microseconds(function: Callable[[], object]) -> float:
        samples = []
        for _ in range(2000):
            function()
        for _ in range(ROUNDS * 8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                function()
            samples.append((time.perf_counter() - start) / 50 * 1e6)
        return round(statistics.median(samples), 1)

    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        inference = microseconds(lambda: tilewise.flash_attention(q, q, q))
    return {"inference": inference, "training": microseconds(lambda: tilewise.flash_attention(leaf, leaf, leaf))}


def main() -> None:
    """Print a table, and save it as JSON on request."""
    path = where_to_save(__doc__)
    rows = []
    print(
        f"{'shape':<24} {'causal':<6} {'direction':<9} {'tilewise':>9} {'cuDNN':>7} {'FA2':>7}   ratio to cuDNN, FA2;"
        " free order"
    )
    for shape in SHAPES:
        for causal in (False, True):
            for row in measure(shape, causal):
                rows.append(row)
                speed = row["tflops"]
                name = "B{} T{} H{} D{}".format(*shape)
                ratios = "; ".join(
                    ", ".join(f"{row[key].get(name, nan):.2f}" for name in BASELINES)
                    for key in ("ratio", "ratio_free")
                    if key in row
                )
                figures = f"{speed[OURS]:>9} {speed.get('cudnn', nan):>7} {speed.get('fa2', nan):>7}   {ratios}"
                print(f"{name:<24} {causal!s:<6} {row['direction']:<9} {figures}", flush=True)
    overhead = launch_overhead()
    print(
        f"launch overhead of one small forward: {overhead['inference']} µs in inference, {overhead['training']} µs in"
        " training"
    )
    result = {
        "environment": environment("python benchmarks/flash.py"),
        "unit": "TFLOP/s, bf16",
        "launch_overhead_us": overhead,
        "rows": rows,
    }
    save(result, path)


if __name__ == "__main__":
    main()
