"""Times native sparse attention, its selected branch and its parts, against dense attention (cuDNN through torch),
in one run.

python benchmarks/nsa.py --json benchmarks/results/nsa-h200.json
"""

import itertools
import math
from collections.abc import Callable

import torch
from harness import Run, where_to_save
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.timing import Clock, take_turns
from tilewise.ops.flash import launch as flash
from tilewise.ops.nsa import launch
from tilewise.ops.nsa.problem import Sizes

CHANNELS, BLOCK, COUNT, WINDOW = 128, 64, 16, 512
SIZES = Sizes(compress_size=32, compress_stride=16, block_size=BLOCK, block_count=COUNT, init_blocks=1, local_blocks=2)
# (tokens, query heads, KV heads, patterns) of the selected branch alone.
SELECTED = ((65536, 64, 4, ("random", "smooth")), (65536, 16, 4, ("random", "smooth")), (16384, 16, 16, ("random",)))
# Lengths of the whole, with 64 query and 4 KV heads.
LENGTHS = (4096, 8192, 16384, 32768, 65536)
HEADS, KEY_HEADS = 64, 4


def tensors(tokens: int, heads: int, key_heads: int) -> tuple[torch.Tensor, ...]:
    """q, k, v and the output's gradient."""
    torch.manual_seed(0)
    return tuple(
        torch.randn(1, tokens, h, CHANNELS, device="cuda", dtype=torch.bfloat16)
        for h in (heads, key_heads, key_heads, heads)
    )


def pattern(tokens: int, key_heads: int, kind: str, block: int = BLOCK) -> torch.Tensor:
    """Blocks as tokens might choose them: `random`, each on its own; `smooth`, neighbours alike (they share three in
    four), as trained models do.

    The first block and the token's own are always among them.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    blocks, knot = tokens // block, 64
    token = torch.arange(tokens, device="cuda")
    own = token // block
    chosen = []
    for _ in range(key_heads):
        if kind == "random":
            scores = torch.rand(tokens, blocks, device="cuda", generator=generator)
        else:
            knots = torch.randn(tokens // knot + 2, blocks, device="cuda", generator=generator)
            share = (token % knot / knot)[:, None]
            scores = knots[token // knot] * (1 - share) + knots[token // knot + 1] * share
            scores += 0.15 * torch.randn(tokens, blocks, device="cuda", generator=generator)
        scores.masked_fill_(torch.arange(blocks, device="cuda") > own[:, None], -torch.inf)
        scores[:, 0] = 1e8
        scores.scatter_(1, own[:, None], 2e8)
        best, order = scores.topk(COUNT)
        order = order.masked_fill(best == -torch.inf, blocks).sort(-1).values
        chosen.append(order.masked_fill(order == blocks, -1).to(torch.int32))
    return torch.stack(chosen, 1)[None].contiguous()


def dense_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Dense causal attention through cuDNN, forward and backward."""
    leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    o = attend()
    gradient = do.transpose(1, 2)
    return {
        "dense forward": attend,
        "dense backward": lambda: torch.autograd.grad(o, leaves, gradient, retain_graph=True),
    }


def milliseconds(clock: Clock, calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians, the calls taking turns."""
    return {name: round(times.median, 3) for name, times in take_turns(clock, calls).items()}


def selected_row(clock: Clock, tokens: int, heads: int, key_heads: int, kind: str) -> dict[str, object]:
    """The selected branch alone, index work included, against dense attention over the same tensors."""
    q, k, v, do = tensors(tokens, heads, key_heads)
    indices, scale = pattern(tokens, key_heads, kind), CHANNELS**-0.5
    o, lse = launch.selected_forward(q, k, v, indices, None, BLOCK, scale)
    calls = dense_calls(q, k, v, do) | {
        "forward": lambda: launch.selected_forward(q, k, v, indices, None, BLOCK, scale),
        "backward": lambda: launch.selected_backward(q, k, v, indices, o, lse, do, None, None, BLOCK, scale),
    }
    return {
        "case": f"selected, T {tokens}, {heads} and {key_heads} heads, {kind}",
        "kind": "selected",
        "tokens": tokens,
        "heads": heads,
        "key_heads": key_heads,
        "pattern": kind,
        "milliseconds": milliseconds(clock, calls),
    }


def whole_row(clock: Clock, tokens: int) -> dict[str, object]:
    """All of native sparse attention with random inputs: public function, autograd, all three gates."""
    q, k, v, do = tensors(tokens, HEADS, KEY_HEADS)
    calls = dense_calls(q, k, v, do)
    gates = {
        name: torch.rand(1, tokens, HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name in ("g_cmp", "g_slc", "g_swa")
    }
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend() -> torch.Tensor:
        return tilewise.native_sparse_attention(
            *leaves, **gates, block_size=BLOCK, block_count=COUNT, window_size=WINDOW
        )

    o = attend()
    wanted = [*leaves, *gates.values()]
    calls |= {"forward": attend, "backward": lambda: torch.autograd.grad(o, wanted, do, retain_graph=True)}
    row = {
        "case": f"whole, T {tokens}, {HEADS} and {KEY_HEADS} heads",
        "kind": "whole",
        "tokens": tokens,
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "milliseconds": milliseconds(clock, calls),
    }
    return row | memory(attend, wanted, do)


def memory(attend: Callable[[], torch.Tensor], wanted: list[torch.Tensor], do: torch.Tensor) -> dict[str, float]:
    """GB at the peak beyond inputs, outputs, gradients and what is kept for the backward."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    o = attend()
    torch.cuda.synchronize()
    forward = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(o, wanted, do, retain_graph=True)
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del gradients
    return {"forward_gb": round(forward / 1e9, 2), "backward_gb": round(backward / 1e9, 2)}


def parts_row(clock: Clock, tokens: int) -> dict[str, object]:
    """Milliseconds of each part of the forward and the backward, at one length."""
    q, k, v, do = tensors(tokens, HEADS, KEY_HEADS)
    scale, compression = CHANNELS**-0.5, (SIZES.compress_size, SIZES.compress_stride)
    k_cmp, v_cmp = (launch.compress(x, None, None, *compression) for x in (k, v))
    o, lse = launch.compressed_forward(q, k_cmp, v_cmp, None, None, *compression, scale)
    indices = launch.choose(q, k_cmp, lse, None, None, SIZES, scale)
    o_slc, lse_slc = launch.selected_forward(q, k, v, indices, None, BLOCK, scale)
    near = flash.make_inputs(q, k, v, None, None, True, WINDOW - 1, 0, scale, 0.0)
    o_swa, lse_swa = flash.forward(near)
    gate = torch.rand(1, tokens, HEADS, device="cuda", dtype=torch.bfloat16)
    times = milliseconds(
        clock,
        {
            "compress": lambda: launch.compress(k, None, None, *compression),
            "compressed forward": lambda: launch.compressed_forward(q, k_cmp, v_cmp, None, None, *compression, scale),
            "choice": lambda: launch.choose(q, k_cmp, lse, None, None, SIZES, scale),
            "selected forward": lambda: launch.selected_forward(q, k, v, indices, None, BLOCK, scale),
            "window forward": lambda: flash.forward(near),
            "combine": lambda: launch.combine([o, o_slc, o_swa], [gate, gate, gate]),
            "compressed backward": lambda: launch.compressed_backward(
                q, k_cmp, v_cmp, o, lse, do, None, None, None, *compression, scale
            ),
            "selected backward": lambda: launch.selected_backward(
                q, k, v, indices, o_slc, lse_slc, do, None, None, BLOCK, scale
            ),
            "window backward": lambda: flash.backward(near, o_swa, lse_swa, do, None),
            "combine backward, one branch": lambda: launch.combine_backward(do, o, gate),
        },
    )
    return {"case": f"parts, T {tokens}", "kind": "parts", "tokens": tokens, "milliseconds": times}


def overtakes(rows: list[dict], direction: str) -> float | None:
    """The length from which native sparse attention beats dense, between measured ones on log axes; None where it never
    does.
    """
    ratios = [
        (row["tokens"], row["milliseconds"][f"dense {direction}"] / row["milliseconds"][direction]) for row in rows
    ]
    if ratios[0][1] >= 1:
        return ratios[0][0]
    for (short, before), (long, after) in itertools.pairwise(ratios):
        if before < 1 <= after:
            share = -math.log(before) / (math.log(after) - math.log(before))
            return round(short * (long / short) ** share)
    return None


def main() -> None:
    """Print tables, and save the figures as JSON on request."""
    run = Run("nsa", where_to_save(__doc__), dtype="bf16")
    clock = Clock(torch.device("cuda"))
    whole = []
    for tokens in LENGTHS:
        run.begin(f"whole, T {tokens}")
        whole.append(whole_row(clock, tokens))
        run.add(whole[-1])
        torch.cuda.empty_cache()
    for tokens, heads, key_heads, kinds in SELECTED:
        for kind in kinds:
            run.begin(f"selected, T {tokens}, {heads} and {key_heads} heads, {kind}")
            run.add(selected_row(clock, tokens, heads, key_heads, kind))
            torch.cuda.empty_cache()
    run.begin("parts")
    run.add(parts_row(clock, LENGTHS[-1]))
    beats = {direction: overtakes(whole, direction) for direction in ("forward", "backward")}
    run.document["about"]["beats_dense_from"] = beats
    run.save()
    run.print_table()
    print(f"beats dense from T = {beats['forward']} forward, {beats['backward']} backward")


if __name__ == "__main__":
    main()
