"""Compiles flash kernels without a GPU and prints what they use as JSON: `compile_kernels.py ARCHITECTURE DTYPE D VARIANT`.

A process of its own, for the tests' process interprets kernels.
"""

import dataclasses
import json
import sys

import torch

from tilewise.inspect.compile import compile_launch
from tilewise.ops.flash import configs, launch

VARIANTS = {
    "causal": {"causal": True},
    "plain": {},
    "packed": {"causal": True, "packed": True},
    "all": {"left": 100, "right": 20, "softcap": 30.0, "scale": -0.5, "packed": True},
}


def launches(dtype: torch.dtype, channels: int, architecture: int, options: dict) -> list:
    packed = options.pop("packed", False)
    shape = (4096, 8) if packed else (2, 2048, 8)
    q, k, v = (torch.empty(*shape, channels, dtype=dtype, device="meta") for _ in range(3))
    offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
    defaults = {"causal": False, "left": -1, "right": -1, "scale": channels**-0.5, "softcap": 0.0}
    inputs = launch.make_inputs(q, k, v, offsets, offsets, **defaults | options)
    o, lse = torch.empty_like(v), torch.empty(8, 4096, device="meta")
    fwd, dkdv, dq = (configs.choose(kernel, inputs.problem(), architecture) for kernel in ("fwd", "dkdv", "dq"))
    return [launch.forward_launch(inputs, o, lse, fwd), *launch.backward_launches(inputs, o, lse, o, None, (q, k, v), dkdv, dq)]


def main(architecture: str, dtype: str, channels: str, variant: str) -> None:
    found = launches(getattr(torch, dtype), int(channels), int(architecture), dict(VARIANTS[variant]))
    compiled = [dataclasses.asdict(compile_launch(item, int(architecture))) for item in found]
    print(json.dumps([{name: value for name, value in item.items() if name != "ptx"} for item in compiled]))


main(*sys.argv[1:])
