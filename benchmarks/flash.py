"""Times flash attention, forward and backward, against what a user would pick instead (cuDNN and FlashAttention-2
through torch, and FlashAttention-4 where it is installed), in one run.

python benchmarks/flash.py --json benchmarks/results/flash-h200.json

Kernels are compiled first, in as many processes as there are cores; FlashAttention-4 keeps its own from process to
process with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1.
"""

import functools
import itertools
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from harness import Run, where_to_save
from torch.nn.attention import SDPBackend

import tilewise
from tilewise.bench.contender import Call, CannotRunError, as_leaf
from tilewise.bench.dense import Dense, fa4, flash_attn_4, fused
from tilewise.bench.timing import Clock, host_times, take_turns


class Shape(NamedTuple):
    """Sequences of one length, or packed ones of `lengths`; KV heads (0: as many as query heads), channels of q and k,
    and of v (0: as many).
    """

    batch: int
    tokens: int
    heads: int
    channels: int
    kv_heads: int = 0
    value_channels: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What a row is called."""
        where = f"{len(self.lengths)} packed" if self.lengths else f"B {self.batch}, T {self.tokens}"
        heads = f"H {self.heads}" + (f" / {self.kv_heads}" if self.kv_heads else "")
        return f"{where}, {heads}, D {self.channels}" + (f" / {self.value_channels}" if self.value_channels else "")

    def draw(self) -> list[torch.Tensor]:
        """q, k and v in bf16, `[B, T, H, D]`, packed without B."""
        lead = (sum(self.lengths),) if self.lengths else (self.batch, self.tokens)
        kv_heads, values = self.kv_heads or self.heads, self.value_channels or self.channels
        sizes = (self.heads, self.channels), (kv_heads, self.channels), (kv_heads, values)
        return [torch.randn(*lead, *size, device="cuda", dtype=torch.bfloat16) for size in sizes]

    def operations(self, causal: bool, direction: str) -> float:
        """2 · B · H · T² · (D + Dv) forward, half of it if causal; 2.5 times that backward."""
        pairs = sum(length**2 for length in self.lengths or (self.tokens,) * self.batch)
        forward = 2 * self.heads * pairs * (self.channels + (self.value_channels or self.channels))
        return forward * (0.5 if causal else 1.0) * (1.0 if direction == "forward" else 2.5)


def unequal() -> tuple[int, ...]:
    """Lengths of 16 sequences, uniform from 1 to 4096."""
    return tuple(torch.randint(1, 4097, (16,), generator=torch.Generator().manual_seed(0)).tolist())


# (heads, channels, value channels)
_NARROW = ((16, 128, 0), (32, 64, 0), (16, 96, 0))
_WIDE = ((16, 192, 0), (16, 192, 128), (8, 256, 0))
SHAPES = (
    *(Shape(*lead, heads, d, 0, dv) for heads, d, dv in _NARROW + _WIDE for lead in ((8, 2048), (1, 16384))),
    *(Shape(4, 4096, heads, d, 0, dv) for heads, d, dv in _WIDE),
    Shape(4, 4096, 48, 32),
    Shape(1, 16384, 32, 128, 4),
    Shape(1, 16384, 32, 64, 4),
    *(Shape(0, 0, heads, d, lengths=unequal()) for heads, d in ((16, 128), (32, 64))),
)
# FlashAttention-4 as called by default, and with dq summed in a fixed order, which matters to its backward alone.
FA4, FA4_FIXED = "flash-attn-4", "flash-attn-4-fixed"
# Ours, as called by default, and with dq summed in any order, which matters to the backward of Hopper's own kernels
# alone.
OURS, FREE = "tilewise", "tilewise free"
Builder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Dense], Call]


def ours(deterministic: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Dense) -> Call:
    """tilewise's, in the layout of `draw`."""
    leaves = [as_leaf(x) for x in (q, k, v)]
    starts = None
    if dense.lengths:
        starts = torch.tensor([0, *itertools.accumulate(dense.lengths)], dtype=torch.int32, device=q.device)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    causal = dense.right == 0
    return Call(
        lambda: (tilewise.flash_attention(*leaves, causal=causal, deterministic=deterministic, **packed),), leaves
    )


PEERS: dict[str, Builder] = {
    "cudnn": functools.partial(fused, SDPBackend.CUDNN_ATTENTION),
    "fa2": functools.partial(fused, SDPBackend.FLASH_ATTENTION),
    FA4: functools.partial(fa4, False),
    FA4_FIXED: functools.partial(fa4, True),
}
ALL: dict[str, Builder] = {OURS: functools.partial(ours, True), FREE: functools.partial(ours, False)} | PEERS


def calls(shape: Shape, causal: bool) -> dict[str, dict[str, Callable[[], object]]]:
    """Of each direction by name, each run once."""
    found: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    dense = Dense(right=0 if causal else -1, lengths=shape.lengths)
    for name, build in ALL.items():
        try:
            call = build(*shape.draw(), dense)
            (o,) = call.run()
            backward = functools.partial(torch.autograd.grad, o, call.leaves, torch.randn_like(o), retain_graph=True)
            backward()
        except (AssertionError, CannotRunError, RuntimeError, ValueError) as error:
            # cuDNN through torch does not take every width, none of torch's packed sequences, FlashAttention-4 not
            # every GPU.
            if name not in PEERS or isinstance(error, torch.OutOfMemoryError):
                raise
            continue
        if name not in (FREE, FA4_FIXED):
            found["forward"][name] = call.run
        found["backward"][name] = backward
    return found


def case_name(shape: Shape, causal: bool) -> str:
    """What a row is called."""
    return f"{shape.name}{', causal' if causal else ''}"


def measure(clock: Clock, shape: Shape, causal: bool) -> list[dict[str, object]]:
    """Median milliseconds of each implementation, the implementations taking turns."""
    rows = []
    for direction, functions in calls(shape, causal).items():
        medians = {name: times.median for name, times in take_turns(clock, functions).items()}
        row: dict[str, object] = {"case": case_name(shape, causal), **shape._asdict()}
        row |= {"causal": causal, "direction": direction}
        work = shape.operations(causal, direction)
        row["milliseconds"] = {name: round(value, 4) for name, value in medians.items()}
        row["tflops"] = {name: round(work / value / 1e9, 1) for name, value in medians.items()}
        row["ratio"] = {name: round(medians[name] / medians[OURS], 3) for name in PEERS if name in medians}
        if FREE in medians:
            row["ratio_free"] = {name: round(medians[name] / medians[FREE], 3) for name in PEERS if name in medians}
        rows.append(row)
    return rows


def compile_kernels() -> None:
    """Of all shapes, into what Triton and FlashAttention-4 keep on disk."""
    cases = list(itertools.product(SHAPES, (False, True)))
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_run_once, cases):
            pass


def _run_once(case: tuple[Shape, bool]) -> None:
    calls(*case)
    torch.cuda.synchronize()


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
    try:
        flash_attn_4()
    except (CannotRunError, ImportError) as error:
        run.begin(f"{FA4} is not timed: {error}")
    run.begin("compiling")
    compile_kernels()
    for shape, causal in itertools.product(SHAPES, (False, True)):
        run.begin(case_name(shape, causal))
        for row in measure(clock, shape, causal):
            run.add(row)
        torch.cuda.empty_cache()
    run.begin("launch overhead")
    run.add({"case": "launch overhead of one small forward", "microseconds": launch_overhead()})
    run.print_table()


if __name__ == "__main__":
    main()
