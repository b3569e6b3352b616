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
    "compressed": {"strided": True},
    "compressed-packed": {"strided": True, "packed": True},
}


def launches(dtype: torch.dtype, channels: int, architecture: int, options: dict) -> list:
    packed, strided = options.pop("packed", False), options.pop("strided", False)
    # Strided: a key every 16 queries, as compressed attention has them, for groups of 4 heads with a program each in dK/dV.
    keys, heads_k, parts = (512, 2, 4) if strided else (2048, 8, 1)
    q = _rows(packed, 2048, 8, channels, dtype)
    k, v = (_rows(packed, keys, heads_k, channels, dtype) for _ in range(2))
    dk, dv = (_rows(packed, keys, heads_k * parts, channels, torch.float32 if strided else dtype) for _ in range(2))
    offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
    defaults = {"causal": False, "left": -1, "right": -1, "scale": channels**-0.5, "softcap": 0.0}
    inputs = launch.make_inputs(q, k, v, offsets, offsets, **defaults | options)
    if strided:
        inputs = inputs._replace(right=-31, key_stride=16)
    o, lse = torch.empty_like(q), torch.empty(8, 4096, device="meta")
    fwd, dkdv, dq = (configs.choose(kernel, inputs.problem(), architecture) for kernel in ("fwd", "dkdv", "dq"))
    dkdv = dkdv._replace(parts=parts)
    return [launch.forward_launch(inputs, o, lse, fwd), *launch.backward_launches(inputs, o, lse, o, None, (q, dk, dv), dkdv, dq)]


def _rows(packed: bool, tokens: int, heads: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, D], or as many rows packed."""
    return torch.empty(*((2 * tokens,) if packed else (2, tokens)), heads, channels, dtype=dtype, device="meta")


def main(architecture: str, dtype: str, channels: str, variant: str) -> None:
    found = launches(getattr(torch, dtype), int(channels), int(architecture), dict(VARIANTS[variant]))
    compiled = [dataclasses.asdict(compile_launch(item, int(architecture))) for item in found]
    print(json.dumps([{name: value for name, value in item.items() if name != "ptx"} for item in compiled]))


main(*sys.argv[1:])
