"""Times HSTU attention and its block-sparse form on a GPU, against plain torch and against each other, in one run.

python benchmarks/hstu.py --json benchmarks/results/hstu-h200.json

Dense operations are counted on real work: H · Σ L² · (D + Dv) forward for sequences of lengths L under a causal mask,
2.5 times that backward.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from harness import Run, where_to_save

import tilewise
from tilewise.bench.timing import Clock, graph_milliseconds, take_turns

# (batch, longest sequence, heads, channels of q and k, channels of v)
Shape = tuple[int, int, int, int, int]
DENSE: tuple[Shape, ...] = (
    (32, 1024, 8, 32, 64),
    (8, 4096, 8, 32, 64),
    (32, 2048, 4, 128, 128),
    (8, 8192, 4, 128, 128),
)
SPARSE: tuple[Shape, ...] = (
    (1, 64, 4, 16, 32),
    (2, 128, 8, 32, 64),
    (4, 256, 8, 32, 64),
    (8, 512, 8, 32, 64),
    (16, 1024, 8, 32, 64),
    (8, 4096, 8, 32, 64),
    (8, 4096, 4, 128, 128),
    (32, 4096, 4, 128, 128),
    (8, 8192, 4, 128, 128),
)
COUNT, BLOCK = 4, 32
Calls = dict[str, Callable[[], object]]


class Batch:
    """Packed random tensors of one shape, bf16: full-length sequences, or lengths drawn evenly from 1 to
    the longest.
    """

    def __init__(self, shape: Shape, jagged: bool) -> None:
        batch, longest, heads, channels, values = shape
        generator = torch.Generator().manual_seed(0)
        self.lengths = (
            torch.randint(1, longest + 1, (batch,), generator=generator).tolist() if jagged else [longest] * batch
        )
        self.longest = longest
        self.offsets = torch.tensor([0, *itertools.accumulate(self.lengths)], device="cuda")
        torch.manual_seed(0)
        tokens = sum(self.lengths)

        def draw(*last: int) -> torch.Tensor:
            return torch.randn(tokens, heads, *last, device="cuda", dtype=torch.bfloat16).requires_grad_()

        self.q, self.k, self.v, self.u, self.do = (
            draw(channels),
            draw(channels),
            draw(values),
            draw(values),
            draw(values).detach(),
        )
        self.gates = [
            torch.rand(tokens, heads, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
        ]
        self.operations = heads * sum(length * length for length in self.lengths) * (channels + values)


class Attention(NamedTuple):
    """One way to attend, what it is differentiated by, and the gradient that arrives."""

    attend: Callable[[], torch.Tensor]
    leaves: list[torch.Tensor]
    do: torch.Tensor

    def step(self) -> object:
        """Forward and backward."""
        return torch.autograd.grad(self.attend(), self.leaves, self.do)

    def calls(self, name: str) -> Calls:
        """The forward, the backward alone, and both as one step."""
        o = self.attend()
        return {
            f"{name} forward": self.attend,
            f"{name} backward": lambda: torch.autograd.grad(o, self.leaves, self.do, retain_graph=True),
            f"{name} step": self.step,
        }


def dense(batch: Batch) -> Attention:
    """HSTU attention, causal."""
    leaves = [batch.q, batch.k, batch.v]
    return Attention(
        lambda: tilewise.hstu_attention(*leaves, batch.offsets, max_seq_len=batch.longest), leaves, batch.do
    )


def sparse(batch: Batch) -> Attention:
    """Block-sparse attention with gates, without a window."""
    leaves, gates = [batch.q, batch.k, batch.v, batch.u], batch.gates

    def attend() -> torch.Tensor:
        return tilewise.block_sparse_attn(*leaves, *gates, None, COUNT, BLOCK, seq_offsets=batch.offsets)[0]

    return Attention(attend, [*leaves, *gates], batch.do)


KINDS = {"dense": dense, "block-sparse": sparse}


def in_torch(batch: Batch) -> Attention:
    """What a user would write in torch for sequences of one length: two batched products with SiLU and the causal mask
    between them.
    """
    count = len(batch.lengths)
    q, k, v = (
        x.detach().unflatten(0, (count, -1)).transpose(1, 2).contiguous().requires_grad_()
        for x in (batch.q, batch.k, batch.v)
    )
    keep = torch.ones(batch.longest, batch.longest, dtype=torch.bool, device="cuda").tril()

    def attend() -> torch.Tensor:
        weights = torch.nn.functional.silu(q @ k.mT * q.shape[-1] ** -0.5) / batch.longest
        return weights.masked_fill(~keep, 0.0) @ v

    return Attention(attend, [q, k, v], batch.do.unflatten(0, (count, -1)).transpose(1, 2))


def in_graphs(clock: Clock, shape: Shape, jagged: bool, *kinds: str) -> dict[str, float]:
    """Milliseconds as CUDA graphs, which leave the host out: forwards, steps, and backwards as the difference of the
    two.

    Each with leaves of its own: autograd ties a leaf to the stream that it first met, and a graph is recorded on
    another.
    """
    times = {}
    for kind in kinds:
        forward, step = KINDS[kind](Batch(shape, jagged)).attend, KINDS[kind](Batch(shape, jagged)).step
        for name, call in (("forward", forward), ("step", step)):
            times[f"{kind} {name}"] = round(graph_milliseconds(clock, call), 3)
        times[f"{kind} backward"] = round(times[f"{kind} step"] - times[f"{kind} forward"], 3)
    return times


def rates(batch: Batch, times: dict[str, float]) -> dict[str, int]:
    """TFLOP/s of dense forwards and backwards."""
    return {
        name: round(factor * batch.operations / times[f"dense {name}"] / 1e9)
        for name, factor in (("forward", 1.0), ("backward", 2.5))
    }


def milliseconds(clock: Clock, calls: Calls) -> dict[str, float]:
    """Medians, the calls taking turns."""
    return {name: round(times.median, 3) for name, times in take_turns(clock, calls).items()}


def described(kind: str, shape: Shape, jagged: bool) -> dict[str, object]:
    """What a row is of."""
    batch, longest, heads, channels, values = shape
    lengths = "jagged" if jagged else "full"
    name = f"{kind}, {lengths}, B {batch}, N {longest}, H {heads}, D {channels}, Dv {values}"
    return {"case": name, "kind": kind, "lengths": lengths, "shape": list(shape)}


def dense_row(clock: Clock, shape: Shape, jagged: bool) -> dict[str, object]:
    """One shape, full-length against torch, or jagged; as called, and as CUDA graphs."""
    batch = Batch(shape, jagged)
    times = milliseconds(clock, dense(batch).calls("dense") | ({} if jagged else in_torch(batch).calls("torch")))
    graphs = in_graphs(clock, shape, jagged, "dense")
    figures = {"milliseconds": times, "graph_milliseconds": graphs}
    return (
        described("dense", shape, jagged)
        | figures
        | {"tflops": rates(batch, times), "graph_tflops": rates(batch, graphs)}
    )


def sparse_row(clock: Clock, shape: Shape) -> dict[str, object]:
    """One shape, full-length: block-sparse against dense, as called, and as CUDA graphs."""
    batch = Batch(shape, jagged=False)
    times = milliseconds(clock, dense(batch).calls("dense") | sparse(batch).calls("block-sparse"))
    graphs = in_graphs(clock, shape, False, *KINDS)
    return described("block-sparse", shape, False) | {"milliseconds": times, "graph_milliseconds": graphs}


def main() -> None:
    """Print the figures, and save them as JSON on request."""
    run = Run("hstu", where_to_save(__doc__), dtype="bf16")
    clock = Clock(torch.device("cuda"))
    for shape in DENSE:
        for jagged in (False, True):
            run.begin(f"dense, {'jagged' if jagged else 'full'}, {shape}")
            run.add(dense_row(clock, shape, jagged))
            torch.cuda.empty_cache()
    for shape in SPARSE:
        run.begin(f"block-sparse, {shape}")
        run.add(sparse_row(clock, shape))
        torch.cuda.empty_cache()
    run.print_table()


if __name__ == "__main__":
    main()
