"""Compiles the NSA kernels without a GPU and prints what they use as JSON: `compile_kernels.py ARCHITECTURE DTYPE D BLOCK GROUP`.

A process of its own, for the tests' process interprets kernels.
"""

import dataclasses
import json
import sys

import torch

from tilewise.inspect.compile import compile_launch
from tilewise.ops._host.launching import capture
from tilewise.ops.nsa import launch
from tilewise.ops.nsa.sizes import Sizes

TOKENS, KEY_HEADS = 16384, 2


def main(architecture: int, dtype: torch.dtype, channels: int, block: int, group: int) -> None:
    q, k, o = (torch.empty(1, TOKENS, heads, channels, dtype=dtype, device="meta") for heads in (KEY_HEADS * group, KEY_HEADS, KEY_HEADS * group))
    indices = torch.empty(1, TOKENS, KEY_HEADS, 16, dtype=torch.int32, device="meta")
    gate = torch.empty(1, TOKENS, KEY_HEADS * group, dtype=dtype, device="meta")
    with capture(architecture) as launches:
        k_cmp = launch.compress(k, None, None, 32, 16)
        _, lse = launch.compressed_forward(q, k_cmp, k_cmp, None, None, 32, 16, 0.1)
        launch.compressed_backward(q, k_cmp, k_cmp, o, lse, o, None, None, None, 32, 16, 0.1)
        launch.compress_backward(k_cmp, TOKENS, None, None, 32, 16)
        launch.choose(q, k_cmp, lse, None, None, Sizes(32, 16, block, 16, 1, 2), 0.1)
        launch.selected_forward(q, k, k, indices, None, block, 0.1)
        launch.selected_backward(q, k, k, indices, o, lse, o, None, None, block, 0.1)
        launch.combine([o, o, o], [gate, gate, gate])
        launch.combine_backward(o, o, gate)
    kernels = {}
    for item in launches:
        # The backward in key order comes with dQ and without.
        kernels.setdefault((item.kernel.__name__, item.arguments.get("partial_dq") is None), item)
    found = [dataclasses.asdict(compile_launch(item, architecture)) for item in kernels.values()]
    print(json.dumps([{name: value for name, value in item.items() if name != "ptx"} for item in found]))


main(int(sys.argv[1]), getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
