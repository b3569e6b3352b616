"""Times the sparse attention of MiniMax-M3 as its layers call it, 16 blocks of 128 keys a token and KV head, against
dense attention over the same tensors, in one run.

python benchmarks/minimax.py --json benchmarks/results/minimax-h200.json

`random`: every token chooses blocks on its own; `smooth`: neighbours choose alike, as those of trained models do.
"""

from collections.abc import Callable

import torch
from harness import Run, medians, where_to_save
from nsa import pattern
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.timing import Clock

LENGTHS = (8192, 32768, 131072)
HEADS, KEY_HEADS, CHANNELS, BLOCK = 64, 4, 128, 128
KINDS = ("random", "smooth")
DENSE = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
Calls = dict[str, Callable[[], object]]


def draw(tokens: int) -> list[torch.Tensor]:
    """q, k and v, `[B, H, T, D]` in the layouts that layers give them: rotated q and k are new, v is a view."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, h, tokens, CHANNELS, device="cuda", dtype=torch.bfloat16) for h in (HEADS, KEY_HEADS))
    v = torch.randn(1, tokens, KEY_HEADS, CHANNELS, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return [x.requires_grad_() for x in (q, k, v)]


def attentions(tokens: int) -> dict[str, Callable[..., torch.Tensor]]:
    """By name, of q, k and v."""

    def sparse(kind: str) -> Callable[..., torch.Tensor]:
        # [B, Hk, T, S] of int64, as the model has it.
        indices = pattern(tokens, KEY_HEADS, kind, BLOCK).transpose(1, 2).contiguous().long()

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in tensors)
            return tilewise.selected_attention(q, k, v, indices.transpose(1, 2), block_size=BLOCK)

        return attend

    def through_torch(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).transpose(1, 2)

        return attend

    def flash(*tensors: torch.Tensor) -> torch.Tensor:
        return tilewise.flash_attention(*(x.transpose(1, 2) for x in tensors), causal=True)

    return (
        {kind: sparse(kind) for kind in KINDS}
        | {"tilewise dense": flash}
        | {name: through_torch(backend) for name, backend in DENSE.items()}
    )


def measure(clock: Clock, tokens: int) -> list[dict[str, object]]:
    """A row for the forward, one for the backward."""
    inputs = draw(tokens)
    do = torch.randn(1, tokens, HEADS, CHANNELS, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Calls] = {"forward": {}, "backward": {}}
    for name, attend in attentions(tokens).items():
        o = attend(*inputs)
        calls["forward"][name] = lambda attend=attend: attend(*inputs)
        calls["backward"][name] = lambda o=o: torch.autograd.grad(o, inputs, do, retain_graph=True)
    rows = []
    for direction, functions in calls.items():
        found = medians(clock, functions)
        best = min(time for name, time in found.items() if name not in KINDS)
        rows.append(
            {
                "case": f"T {tokens}, {direction}",
                "tokens": tokens,
                "direction": direction,
                "milliseconds": found,
                # How much faster than the best of the dense ones.
                "speedup": {kind: round(best / found[kind], 2) for kind in KINDS},
            }
        )
    return rows


def main() -> None:
    """Every length."""
    run = Run("minimax", where_to_save(__doc__), dtype="bf16")
    clock = Clock(torch.device("cuda"))
    for tokens in LENGTHS:
        run.begin(f"T {tokens}")
        for row in measure(clock, tokens):
            run.add(row)
        torch.cuda.empty_cache()
    run.print_table()


if __name__ == "__main__":
    main()
