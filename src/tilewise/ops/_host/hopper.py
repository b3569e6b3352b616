"""Host side of the Gluon kernels for Hopper: tensor descriptors for tiles of rows, of dense and of packed tensors,
and the SMs to fill.
"""

import functools
from typing import Any

import torch

from tilewise.ops._device.hopper.ring import RAGGED_ROWS
from tilewise.ops._host import backend, launching
from tilewise.ops._host.gluon import gl
from tilewise.ops._host.launch import Descriptor
from tilewise.ops._host.symbol import cached

# SMs where there is no GPU to ask: an H100's and an H200's.
SMS = 132
# A packed descriptor's outermost axis, see `tile_descriptor`: RAGGED_ROWS steps of this stride wrap around 2^64.
MOST_ROWS = RAGGED_ROWS.value
RAGGED_STRIDE = 2**64 // MOST_ROWS
# More than any index along that axis and the next.
MANY = 2**31 - 2**16
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def fits_tiles(x: torch.Tensor) -> bool:
    """Whether `tile_descriptor` can describe dense `[B, T, H, D]` or packed `[N, H, D]` in place: aligned to 16 bytes
    in every axis, not empty.
    """
    if x.dim() == 4:
        return launching.fits_descriptor(x)
    if x.dim() != 3 or x.data_ptr() % 16 != 0 or x.numel() == 0 or x.shape[0] > MOST_ROWS:
        return False
    first, second, _ = x.stride()
    return (
        (first | second) % (16 // x.element_size()) == 0
        and min(first, second) > 0
        and max(first, second) < RAGGED_STRIDE
    )


@cached
def _layout(dtype: torch.dtype, *block_shape: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), DTYPES[dtype])


def tile_descriptor(x: torch.Tensor, rows: int, columns: int) -> Descriptor:
    """For tiles of `rows` tokens and `columns` channels of one head, to be read with `load_tile` and written with
    `store_tile`.

    Dense: over `[B, H, T, D]`. What lies past T or D reads as 0 and is not written.

    Packed: a sequence's end is no end of the tensor, and the next sequence's rows may hold NaN. So the axis of rows is
    given RAGGED_ROWS of them, and a sequence is shifted so that its end falls on that end: row r of n, of the sequence
    that ends at token e, has index `RAGGED_ROWS - n + r`. Two more axes bring its address, with s for the stride of
    rows, back to `(e - n + r) · s`: one with index e and stride s; one with index RAGGED_ROWS and stride
    `RAGGED_STRIDE - s`, which gives `2^64 - RAGGED_ROWS · s` elements, and addresses count modulo 2^64.
    """
    if x.dim() == 4:
        batch, tokens, heads, channels = x.shape
        stride_b, stride_t, stride_h, _ = x.stride()
        shape: tuple[int, ...] = (batch, heads, tokens, channels)
        strides: tuple[int, ...] = (stride_b, stride_h, stride_t, 1)
        block: tuple[int, ...] = (1, 1, rows, columns)
    else:
        _, heads, channels = x.shape
        stride_t, stride_h, _ = x.stride()
        shape = (MANY, MANY, heads, MOST_ROWS, channels)
        strides, block = (RAGGED_STRIDE - stride_t, stride_t, stride_h, stride_t, 1), (1, 1, 1, rows, columns)
    return Descriptor(x, shape, strides, block, _layout(x.dtype, *block))


def sm_count(device: torch.device) -> int:
    """How many SMs a device has; an H100's where launches are only collected."""
    device = backend.actual(device)
    if device.type != "cuda" or backend.pretended() is not None:
        return SMS
    return _sm_count(device)


@functools.cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
