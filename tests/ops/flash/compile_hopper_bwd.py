"""Compiles Hopper's backward without a GPU and prints what its kernels use as JSON, in a process of its own.

`compile_hopper_bwd.py DTYPE CHANNELS VALUE_CHANNELS VARIANT ORDER`: one of VARIANTS, in an order of
`hopper_configs.Order`.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from compile_launches import print_facts

from tilewise.ops._host.launching import capture
from tilewise.ops.flash import launch
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.ops.flash.hopper.configs import Order

TOKENS, HEADS = 2048, 8
VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "groups": {"causal": True, "heads_k": 4},
    "sweeps": {"heads_k": 4},
    "window": {"causal": True, "left": 512, "heads_k": 4},
    "one-head-window": {"causal": True, "left": 512},
    "packed": {"causal": True, "packed": True},
    "softcap": {"softcap": 30.0},
    "uncapped": {"left": 100, "right": 20, "scale": -0.5, "packed": True, "heads_k": 2, "sinks": True},
    "all": {"left": 100, "right": 20, "softcap": 30.0, "scale": -0.5, "packed": True, "heads_k": 2, "sinks": True},
}


def main(dtype: torch.dtype, channels: int, values: int, variant: str, order: Order) -> None:
    usual = {
        "causal": False,
        "left": -1,
        "right": -1,
        "scale": 0.125,
        "softcap": 0.0,
        "packed": False,
        "heads_k": HEADS,
    }
    options = usual | VARIANTS[variant]
    packed, heads_k = options.pop("packed"), options.pop("heads_k")
    sinks = torch.empty(HEADS, dtype=dtype, device="meta") if options.pop("sinks", False) else None
    lead = (2 * TOKENS,) if packed else (2, TOKENS)

    def rows(heads: int, width: int) -> torch.Tensor:
        return torch.empty(*lead, heads, width, dtype=dtype, device="meta")

    q, k, v, o = rows(HEADS, channels), rows(heads_k, channels), rows(heads_k, values), rows(HEADS, values)
    lse = torch.empty(*lead[:-1], HEADS, lead[-1], device="meta")
    offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
    inputs = launch.make_inputs(q, k, v, offsets, offsets, **options, sinks=sinks)
    with capture(90) as launches:
        hopper_launch.backward(inputs, o, lse, o, lse, order)
    print_facts(launches, 90)


if __name__ == "__main__":
    main(getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
