"""Times flash attention over packed sequences of unequal lengths against equal ones, and with shared KV heads
against one for each query head.

The latter over packed sequences of equal lengths, and over the batches of benchmarks/flash.py.

python benchmarks/flash_layouts.py --json benchmarks/results/flash-layouts-h200.json
"""

import itertools
from collections.abc import Callable

import torch
from harness import Run, where_to_save

import tilewise
from tilewise.bench.timing import Clock, take_turns

# (heads, channels), as benchmarks/flash.py has them.
WIDTHS = ((16, 128), (32, 64))
SEQUENCES, LONGEST = 16, 4096
GROUP = 8
# (batch, tokens)
BATCHES = ((8, 2048), (1, 16384))


def lengths(seed: int = 0) -> list[int]:
    """Uniform from 1 to LONGEST."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, LONGEST + 1, (SEQUENCES,), generator=generator).tolist()


def operations(of: list[int], heads: int, channels: int, causal: bool, direction: str) -> float:
    """4 · H · D · T² of each sequence forward, half of it if causal; 2.5 times that backward."""
    return (
        4
        * heads
        * channels
        * sum(length**2 for length in of)
        * (0.5 if causal else 1.0)
        * (1.0 if direction == "forward" else 2.5)
    )


def calls(
    of: list[int], heads: int, heads_k: int, channels: int, causal: bool, packed: bool
) -> dict[str, Callable[[], object]]:
    """Forward and backward over sequences, packed or a batch of equal ones."""
    offsets = torch.tensor([0, *of], device="cuda").cumsum(0).to(torch.int32) if packed else None
    lead = (sum(of),) if packed else (len(of), of[0])
    q, k, v = (
        torch.randn(*lead, count, channels, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, heads_k, heads_k)
    )

    def attend() -> torch.Tensor:
        return tilewise.flash_attention(q, k, v, causal=causal, cu_seqlens_q=offsets, cu_seqlens_k=offsets)

    o = attend()
    do = torch.randn_like(o)
    return {"forward": attend, "backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)}


def measure(
    clock: Clock, equal: list[int], unequal: list[int] | None, heads: int, channels: int, causal: bool
) -> list[dict[str, object]]:
    """Rates of equal lengths, with one query head a KV head and with GROUP, taken in turns.

    Where `unequal` is given, sequences are packed, and its lengths are timed too.
    """
    kinds = {"equal": (equal, heads), "groups": (equal, heads // GROUP)} | (
        {} if unequal is None else {"unequal": (unequal, heads)}
    )
    made = {
        name: calls(of, heads, heads_k, channels, causal, unequal is not None) for name, (of, heads_k) in kinds.items()
    }
    rows = []
    for direction in ("forward", "backward"):
        timed = take_turns(clock, {name: both[direction] for name, both in made.items()})
        times = {name: round(one.median, 3) for name, one in timed.items()}
        rates = {
            name: operations(kinds[name][0], heads, channels, causal, direction) / time / 1e9
            for name, time in times.items()
        }
        name = f"{'packed, ' if unequal else ''}B {len(equal)}, T {equal[0]}, H {heads}, D {channels}"
        row: dict[str, object] = {
            "case": f"{name}{', causal' if causal else ''}, {direction}",
            "sequences": len(equal),
            "tokens": equal[0],
            "packed": unequal is not None,
            "heads": heads,
            "channels": channels,
        }
        row |= {"causal": causal, "direction": direction, "milliseconds": times}
        row["tflops"] = {name: round(rate, 1) for name, rate in rates.items()}
        row["of_equal"] = {name: round(rates[name] / rates["equal"], 3) for name in kinds if name != "equal"}
        rows.append(row)
    return rows


def main() -> None:
    """Print a table, and save it as JSON on request."""
    unequal = lengths()
    run = Run("flash_layouts", where_to_save(__doc__), dtype="bf16", lengths=unequal)
    clock = Clock(torch.device("cuda"))
    layouts = [
        ([sum(unequal) // SEQUENCES] * SEQUENCES, unequal),
        *(([tokens] * batch, None) for batch, tokens in BATCHES),
    ]
    for (of, others), (heads, channels), causal in itertools.product(layouts, WIDTHS, (False, True)):
        run.begin(f"{len(of)} sequences of {sum(of)} tokens, H {heads}, D {channels}{', causal' if causal else ''}")
        for row in measure(clock, of, others, heads, channels, causal):
            run.add(row)
    run.print_table()


if __name__ == "__main__":
    main()
