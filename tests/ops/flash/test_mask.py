"""Ranges of keys that stand at a stride."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.ops._device.scores import keys_seen


@triton.jit
def seen_kernel(out, n_queries, n_keys, right, KEY_STRIDE: tl.constexpr):
    tl.store(out, keys_seen(n_queries, n_keys, right, KEY_STRIDE))


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [None, 1, 4, 16])
def test_keys_seen(device, stride):
    for n_queries in (0, 1, 3, 15, 16, 17, 33):
        for n_keys in (0, 1, 2, 9):
            for right in (0, -3, -15):
                out = torch.zeros(1, dtype=torch.int32, device=device)
                seen_kernel[(1,)](out, n_queries, n_keys, right, stride)
                visible = (
                    n_keys
                    if stride is None
                    else sum(any(j * stride <= i + right for i in range(n_queries)) for j in range(n_keys))
                )
                assert out.item() == visible, (n_queries, n_keys, right)
