"""Times a step of decoding over an NSACache against our own dense decoding over as many tokens, in one run: as CUDA
graphs, caches cold in L2.

python benchmarks/nsa_decode.py --json benchmarks/results/nsa-decode-h200.json
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from decode import in_a_row
from harness import Run, where_to_save

import tilewise
from tilewise.bench.timing import Clock, captured, host_times, take_turns

# A graph reads so many bytes of compressed rows, so that none of them stays in L2 from one step to the next.
COLD_BYTES = 512 << 20
NSA, DENSE = "nsa", "dense"
Call = Callable[[], object]


class Shape(NamedTuple):
    """Sequences, tokens of each, query and KV heads, channels, rows of a page (0: dense)."""

    batch: int
    tokens: int
    heads: int = 64
    kv_heads: int = 4
    channels: int = 128
    page: int = 0

    @property
    def compressed_bytes(self) -> int:
        """Of compressed keys and values in bf16."""
        return 4 * self.batch * (self.tokens // 16) * self.kv_heads * self.channels

    @property
    def name(self) -> str:
        """What a row is called."""
        pages = f", pages of {self.page}" if self.page else ""
        return f"B {self.batch}, T {self.tokens}, {self.heads} / {self.kv_heads} heads, D {self.channels}{pages}"


# For Python's share of a step.
CALLED = Shape(1, 1024)


def shapes() -> Iterator[Shape]:
    """Every row."""
    for tokens in (8192, 32768, 131072):
        for batch in (1, 16, 64):
            if batch * tokens <= 16 * 131072:
                yield Shape(batch, tokens)
    for page in (16, 64):
        yield Shape(1, 131072, page=page)
        yield Shape(16, 131072, page=page)
    yield Shape(1, 2**20)


def draw(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def contenders(shape: Shape) -> dict[str, Call]:
    """A step of each, the last that its cache has room for."""
    keys = shape.kv_heads, shape.channels
    paging: dict[str, Any] = {}
    if shape.page:
        pages = -(-shape.tokens // shape.page)
        pools = [draw(shape.batch * pages, shape.page, *keys) for _ in range(2)]
        table = torch.randperm(len(pools[0]), device="cuda").to(torch.int32).view(shape.batch, pages)
        paging = {"page_table": table, "k_pages": pools[0], "v_pages": pools[1]}
    cache = tilewise.NSACache(
        shape.batch, shape.tokens, *keys, shape.channels, **paging, dtype=torch.bfloat16, device="cuda"
    )
    for x in (cache.stored.k, cache.stored.v, cache.k_cmp, cache.v_cmp):
        x.normal_()
    q, gate = draw(shape.batch, 1, shape.heads, shape.channels), draw(shape.batch, 1, shape.heads)
    k = draw(shape.batch, 1, *keys)
    before = torch.full_like(cache.lengths, shape.tokens - 1)

    def step() -> None:
        # Always at the same length, where a window ends with the token: a small launch more than a step is.
        cache.lengths.copy_(before)
        tilewise.nsa_decode_step(q, k, k, cache, g_cmp=gate, g_slc=gate, g_swa=gate)

    def dense() -> None:
        table = cache.stored.table
        tilewise.flash_attention_with_kvcache(
            q, cache.stored.k, cache.stored.v, k, k, cache_seqlens=before, page_table=table
        )

    return {NSA: step, DENSE: dense}


def measure(clock: Clock, shape: Shape) -> dict[str, object]:
    """Median milliseconds of a step by each, in turn."""
    copies = max(1, -(-COLD_BYTES // shape.compressed_bytes))
    made = [contenders(shape) for _ in range(copies)]
    with torch.no_grad():
        graphs = {name: captured(in_a_row([one[name] for one in made])) for name in made[0]}
    medians = {name: found.median / copies for name, found in take_turns(clock, graphs, seconds=0.25).items()}
    return {
        "case": shape.name,
        "copies": copies,
        "graph_milliseconds": {name: round(value, 5) for name, value in medians.items()},
        "times_dense": round(medians[DENSE] / medians[NSA], 2),
    }


def as_called() -> dict[str, object]:
    """Microseconds of Python a step, the GPU left behind."""
    with torch.no_grad():
        found = host_times(contenders(CALLED), "cuda", count=50, rounds=40, warm_up=500)
    return {
        "case": f"{CALLED.name}, as called",
        "microseconds": {name: round(one["host"], 1) for name, one in found.items()},
    }


def main() -> None:
    """Everything."""
    run = Run("nsa_decode", where_to_save(__doc__))
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
