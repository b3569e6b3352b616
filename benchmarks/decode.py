"""Times attention over a cache against what a user would pick instead, cuDNN and FlashAttention-2 through torch, and
against the memory's limit, in one run: as CUDA graphs, caches cold in L2.

python benchmarks/decode.py --json benchmarks/results/decode-h200.json
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from harness import Run, where_to_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.timing import Clock, captured, host_times, take_turns

# What an H200 copies, bytes a second, and its products of 16-bit numbers a second that decoding can reach.
BANDWIDTH, OPERATIONS = 4.3e12, 600e12
# A graph reads so many bytes of caches, so that none of them stays in L2 from one call to the next.
COLD_BYTES = 512 << 20
BASELINES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
OURS = "tilewise"
Call = Callable[[], object]


class Shape(NamedTuple):
    """Sequences, queries and keys of each, query and KV heads, channels, rows of a page (0: dense)."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    channels: int
    page: int = 0

    @property
    def cache_bytes(self) -> int:
        """Of K and V in bf16."""
        return 4 * self.batch * self.keys * self.kv_heads * self.channels

    @property
    def limit(self) -> float:
        """Milliseconds that reading K and V takes, or the products."""
        products = 4 * self.batch * self.queries * self.keys * self.heads * self.channels
        return 1e3 * max(self.cache_bytes / BANDWIDTH, products / OPERATIONS)

    @property
    def name(self) -> str:
        """What a row is called."""
        pages = f", pages of {self.page}" if self.page else ""
        heads = f"{self.heads} / {self.kv_heads} heads, D {self.channels}"
        return f"B {self.batch}, Tq {self.queries}, Tk {self.keys}, {heads}{pages}"


TABLE = ((16, 4096), (64, 4096), (1, 32768), (16, 32768), (1, 131072), (16, 131072), (64, 131072))


def shapes() -> Iterator[Shape]:
    """Every row."""
    for (batch, keys), channels, queries in itertools.product(TABLE, (128, 64), (1, 4)):
        yield Shape(batch, queries, keys, 32, 8, channels)
    paged = itertools.product(((16, 4096), (1, 131072), (16, 32768)), (128, 64), (16, 64, 256))
    for (batch, keys), channels, page in paged:
        yield Shape(batch, 1, keys, 32, 8, channels, page)
    for (batch, keys), heads in itertools.product(((8, 131072), (128, 8192)), (64, 128)):
        yield Shape(batch, 1, keys, heads, 1, 128)
    yield Shape(1, 512, 32768, 32, 8, 128)


def ours(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """A step over caches `[B, T, Hk, D]`, or over the same memory as pages in any order."""
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device="cuda")
    table = None
    if shape.page:
        k, v = (x.view(-1, shape.page, *x.shape[2:]) for x in (k, v))
        table = torch.randperm(len(k), device="cuda").to(torch.int32).view(shape.batch, -1)
    return lambda: tilewise.flash_attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table)


def theirs(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """torch's, whose mask would be aligned at the first key: it has none, which is a little more work."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def in_a_row(calls: list[Call]) -> Call:
    """All of them, one after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


def draw(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v."""
    sizes = ((shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2)
    q, k, v = (torch.randn(shape.batch, *size, shape.channels, device="cuda", dtype=torch.bfloat16) for size in sizes)
    return q, k, v


def contenders(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    """Each as a call."""
    found = {OURS: ours(shape, q, k, v)}
    if shape.page:
        # The dense form of the same step.
        return found | {"dense": ours(shape._replace(page=0), q, k, v)}
    if shape.queries > 64:
        # With more keys than queries is_causal would mean another mask.
        return found | {"dense": lambda: tilewise.flash_attention(q, k, v, causal=True)}
    return found | {name: theirs(backend, q, k, v) for name, backend in BASELINES.items()}


def measure(clock: Clock, shape: Shape) -> dict[str, object]:
    """Median milliseconds of a step by each contender, all in turn."""
    copies = max(1, -(-COLD_BYTES // shape.cache_bytes))
    steps: dict[str, list[Call]] = {}
    for _ in range(copies):
        for name, call in contenders(shape, *draw(shape)).items():
            steps.setdefault(name, []).append(call)
    graphs = {}
    with torch.no_grad():
        for name, calls in steps.items():
            try:
                graphs[name] = captured(in_a_row(calls))
            except (RuntimeError, ValueError) as error:
                # torch's do not take every shape.
                if name not in BASELINES or isinstance(error, torch.OutOfMemoryError):
                    raise
    medians = {name: found.median / copies for name, found in take_turns(clock, graphs, seconds=0.25).items()}
    best = min((value for name, value in medians.items() if name != OURS), default=None)
    return {
        "case": shape.name,
        "limit_milliseconds": round(shape.limit, 5),
        "graph_milliseconds": {name: round(value, 5) for name, value in medians.items()},
        "share_of_limit": {name: round(shape.limit / value, 3) for name, value in medians.items()},
        "to_the_best_other": None if best is None else round(medians[OURS] / best, 3),
    }


def as_called() -> dict[str, object]:
    """Microseconds of Python a call, the GPU left behind."""
    shape = Shape(1, 1, 1024, 32, 8, 128)
    with torch.no_grad():
        q, k, v = draw(shape)
        calls = {OURS: ours(shape, q, k, v), "sdpa": _default(q, k, v)}
        found = host_times(calls, "cuda", count=50, rounds=40, warm_up=500)
    return {
        "case": f"{shape.name}, as called",
        "microseconds": {name: round(one["host"], 1) for name, one in found.items()},
    }


def _default(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True)


def main() -> None:
    """Everything."""
    run = Run("decode", where_to_save(__doc__))
    clock = Clock(torch.device("cuda"))
    for shape in shapes():
        run.begin(shape.name)
        run.add(measure(clock, shape))
        torch.cuda.empty_cache()
    run.begin("as called")
    run.add(as_called())
    run.print_table()


if __name__ == "__main__":
    main()
