"""Times flash attention, forward and backward, against what a user would pick instead (cuDNN and FlashAttention-2
through torch, and FlashAttention-4 where it is installed), in one run.

python benchmarks/flash.py --json benchmarks/results/flash-h200.json
"""

from collections.abc import Callable
from types import ModuleType

import torch
from harness import Run, where_to_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.contender import CannotRunError
from tilewise.bench.dense import flash_attn_4
from tilewise.bench.timing import Clock, host_times, take_turns

# (batch, tokens, heads, channels)
SHAPES = (
    (8, 2048, 16, 128), (1, 16384, 16, 128), (8, 2048, 32, 64), (1, 16384, 32, 64), (4, 4096, 48, 32), (4, 4096, 16,
    192), (4, 4096, 8, 256),
)  # fmt: skip
BASELINES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
# FlashAttention-4 as called by default, and with dq summed in a fixed order, which matters to its backward alone.
FA4, FA4_FIXED = "flash-attn-4", "flash-attn-4-fixed"
PEERS = (*BASELINES, FA4, FA4_FIXED)
# Ours, as called by default, and with dq summed in any order, which matters to the backward of Hopper's own kernels
# alone.
OURS, FREE = "tilewise", "tilewise free"


def operations(batch: int, tokens: int, heads: int, channels: int, causal: bool, direction: str) -> float:
    """4 · B · H · T² · D forward, half of it if causal; 2.5 times that backward."""
    forward = 4 * batch * heads * tokens**2 * channels * (0.5 if causal else 1.0)
    return forward * (1.0 if direction == "forward" else 2.5)


def attentions(causal: bool, fa4: ModuleType | None) -> dict[str, Callable[..., torch.Tensor]]:
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
    theirs = {name: through_torch(backend) for name, backend in BASELINES.items()}
    newest = {
        FA4: lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=causal)[0],
        FA4_FIXED: lambda q, k, v: fa4.flash_attn_func(q, k, v, causal=causal, deterministic=True)[0],
    }
    return ours | theirs | (newest if fa4 else {})


def case_name(shape: tuple[int, int, int, int], causal: bool) -> str:
    """What a row is called."""
    batch, tokens, heads, channels = shape
    return f"B {batch}, T {tokens}, H {heads}, D {channels}{', causal' if causal else ''}"


def measure(
    clock: Clock, shape: tuple[int, int, int, int], causal: bool, fa4: ModuleType | None
) -> list[dict[str, object]]:
    """Median milliseconds of each implementation, the implementations taking turns."""
    batch, tokens, heads, channels = shape
    rows = []
    calls: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, attend in attentions(causal, fa4).items():
        layout = (batch, heads, tokens, channels) if name in BASELINES else (batch, tokens, heads, channels)
        q, k, v = (torch.randn(layout, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        try:
            o = attend(q, k, v)
            do = torch.randn_like(o)
            if name not in (FREE, FA4_FIXED):
                calls["forward"][name] = lambda attend=attend, q=q, k=k, v=v: attend(q, k, v)
            torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
            calls["backward"][name] = lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(
                o, (q, k, v), do, retain_graph=True
            )
        except (AssertionError, RuntimeError, ValueError) as error:
            # cuDNN through torch does not take every width, FlashAttention-4 not on every GPU.
            if name not in PEERS or isinstance(error, torch.OutOfMemoryError):
                raise
    for direction, functions in calls.items():
        medians = {name: times.median for name, times in take_turns(clock, functions).items()}
        row: dict[str, object] = {
            "case": case_name(shape, causal),
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
        row["ratio"] = {name: round(medians[name] / medians[OURS], 3) for name in PEERS if name in medians}
        if FREE in medians:
            row["ratio_free"] = {name: round(medians[name] / medians[FREE], 3) for name in PEERS if name in medians}
        rows.append(row)
    return rows


def launch_overhead() -> dict[str, float]:
    """Microseconds of Python for one small forward call, the GPU left behind: inference, and with a graph for the
    backward.
    """
    q = torch.randn(1, 64, 1, 64, device="cuda", dtype=torch.bfloat16)

    def microseconds(function: Callable[[], object]) -> float:
        return round(host_times({"call": function}, "cuda", count=50, rounds=40, warm_up=2000)["call"]["host"], 1)

    leaf = q.clone().requires_grad_()
    with torch.no_grad():
        inference = microseconds(lambda: tilewise.flash_attention(q, q, q))
    return {"inference": inference, "training": microseconds(lambda: tilewise.flash_attention(leaf, leaf, leaf))}


def main() -> None:
    """Print a table, and save it as JSON on request."""
    run = Run("flash", where_to_save(__doc__), dtype="bf16")
    clock = Clock(torch.device("cuda"))
    fa4 = None
    try:
        fa4 = flash_attn_4()
    except (CannotRunError, ImportError) as error:
        run.begin(f"{FA4} is not timed: {error}")
    for shape in SHAPES:
        for causal in (False, True):
            run.begin(case_name(shape, causal))
            for row in measure(clock, shape, causal, fa4):
                run.add(row)
    run.begin("launch overhead")
    run.add({"case": "launch overhead of one small forward", "microseconds": launch_overhead()})
    run.print_table()


if __name__ == "__main__":
    main()
