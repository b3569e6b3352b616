"""Checks of arguments that all operators share."""

import pytest
import torch

from tilewise import block_sparse_attn, flash_attention
from tilewise.ops._host import checks


def test_an_empty_tensor_is_contiguous_whatever_its_strides():
    """As torch has it: an empty one that was expanded has stride 0 in its last axis."""
    empty = torch.empty(1).expand(2, 0, 4, 16)
    assert empty.is_contiguous()
    assert empty.stride(-1) == 0
    assert flash_attention(empty, empty, empty, backend="cpu").shape == (2, 0, 4, 16)
    o, _ = block_sparse_attn(empty, empty, empty, empty, None, None, None, 2, 8, backend="cpu")
    assert o.shape == (2, 0, 4, 16)


def test_one_with_elements_is_not():
    with pytest.raises(ValueError, match=r"q's last axis has stride 0.*q\.contiguous\(\)"):
        checks.check_last_axis(torch.empty(1).expand(2, 3, 4, 16), "q")
