"""Compiles the kernels of calls whose queries are a part of their sequences, dense and packed, without a GPU, and
prints what they use as JSON: `compile_partial.py ARCHITECTURE`.
"""

import sys

import torch
from compile_launches import print_facts

from tilewise.ops._host.launching import capture
from tilewise.ops.nsa import launch
from tilewise.ops.nsa.problem import Sizes

ARCHITECTURE = int(sys.argv[1])
COUNT, KEYS, BLOCK = 4, 8192, 64


def rows(batch: tuple[int, ...], tokens: int, heads: int) -> torch.Tensor:
    return torch.empty(*batch, tokens, heads, 128, dtype=torch.bfloat16, device="meta")


def numbers(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, device="meta")


def call(packed: bool) -> None:
    batch = () if packed else (COUNT,)
    cu, cu_k, windows = [numbers(COUNT + 1) if packed else None for _ in range(3)]
    first = numbers(COUNT)
    q, k, k_cmp = rows(batch, 1024, 32), rows(batch, KEYS, 2), rows(batch, KEYS // 16, 2)
    o, lse = launch.compressed_forward(q, k_cmp, k_cmp, cu, windows, 32, 16, 0.1, first)
    launch.compressed_backward(q, k_cmp, k_cmp, o, lse, q, None, cu, windows, 32, 16, 0.1, first)
    indices = launch.choose(q, k_cmp, lse, cu, windows, Sizes(32, 16, BLOCK, 16, 1, 2), 0.1, first)
    o, lse = launch.selected_forward(q, k, k, indices, cu, BLOCK, 0.1, cu_k, first)
    launch.selected_backward(q, k, k, indices, o, lse, q, None, cu, BLOCK, 0.1, cu_k, first)


with capture(ARCHITECTURE) as launches:
    for packed in (False, True):
        call(packed)
print_facts(launches, ARCHITECTURE)
