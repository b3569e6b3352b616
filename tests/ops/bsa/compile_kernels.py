"""Compiles the kernels of HSTU attention, dense and block-sparse, without a GPU and prints what they use as JSON.

`compile_kernels.py ARCHITECTURE DTYPE D DV BLOCK`
"""

import dataclasses
import json
import sys

import torch

from tilewise.inspect.compile import compile_launch
from tilewise.ops._host.launching import capture
from tilewise.ops.bsa import launch
from tilewise.ops.bsa.options import Options
from tilewise.ops.hstu import launch as hstu

TOKENS, BATCH, HEADS, COUNT, WINDOW = 16384, 4, 4, 4, 100


def main(architecture: int, dtype: torch.dtype, channels: int, values: int, block: int) -> None:
    q, v, gate = (torch.empty(TOKENS, HEADS, *last, dtype=dtype, device="meta") for last in ((channels,), (values,), ()))
    offsets, targets = (torch.empty(n, dtype=torch.int64, device="meta") for n in (BATCH + 1, BATCH))
    options, gates = Options(COUNT, block, WINDOW, 0.1, True), (gate, gate, None)
    kernels = {}
    for name, history in (("plain", (None, 0, 0)), ("history", (targets, 50, 3))):
        inputs = hstu.make_inputs(q, q, v, offsets, history[0], 4096, 0.1, True, *history[1:])
        with capture(architecture) as launches:
            hstu.forward(inputs)
            hstu.backward(inputs, v)
        kernels |= {(item.kernel.__name__, name): item for item in launches}
    with capture(architecture) as launches:
        results = launch.forward(q, q, v, v, gates, offsets, options)
        launch.backward(v, q, q, v, v, gates, *results[1:], offsets, options)
    for item in launches:
        kernels.setdefault((item.kernel.__name__, item.arguments.get("KEY_STRIDE"), item.arguments.get("left") is None), item)
    found = [dataclasses.asdict(compile_launch(item, architecture)) for item in kernels.values()]
    print(json.dumps([{name: value for name, value in item.items() if name != "ptx"} for item in found]))


main(int(sys.argv[1]), getattr(torch, sys.argv[2]), *map(int, sys.argv[3:]))
