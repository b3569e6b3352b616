"""Cases of what Triton has from 3.7 on: elements of shared memory by their places, reductions by the copy engine, the
copies of a convolution. Where it lacks one there is no case of it.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import gluon_reduction_kernels
import torch
from gluon_newer_kernels import COLUMNS, COUNT, ROWS, gather_kernel, im2col_kernel, scatter_kernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia import hopper

F16, BF16, F32, I8, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
GLUON = {F16: gl.float16, BF16: gl.bfloat16, F32: gl.float32, I8: gl.int8, I32: gl.int32}
PLAIN = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
# Rows of 32 numbers of 16 bits.
SWIZZLED = gl.NVMMASharedLayout(64, 16, 2)
Run = Callable[[torch.device], torch.Tensor]
REDUCED = {
    "add": (I32, F32, F16, BF16),
    "min": (I32, F16, BF16),
    "max": (I32, F16, BF16),
    "and": (I32,),
    "or": (I32,),
    "xor": (I32,),
}


class Pixels(NamedTuple):
    """A copy of a tile of `block` pixels and channels out of images [N, ..., C] of `shape`, from `coord` on."""

    shape: tuple[int, ...]
    coord: tuple[int, ...]
    offsets: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    steps: tuple[int, ...] = ()
    block: tuple[int, int] = (32, 32)
    dtype: torch.dtype = F16
    # Channels of the images in memory, of which these are the first.
    among: int = 0


IMAGES = (2, 4, 4, 32)
WHOLE = Pixels(IMAGES, (0, 0, 0, 0), (0, 0), (0, 0), (0, 0))
# A window of 3 x 3 with one pixel of padding.
PADDED = Pixels(IMAGES, (0, -1, -1, 0), (0, 0), (-1, -1), (-1, -1))
STRIDED = Pixels((3, 9, 8, 32), (0, -1, -1, 0), (0, 0), (-1, -1), (-1, -1), (1, 2, 3, 1))
WIDE = Pixels((2, 4, 4, 72), (0, 0, 0, 0), (0, 0), (0, 0), (0, 0), block=(32, 64))
COPIED = {
    "whole": WHOLE,
    **{f"whole {dtype}": WHOLE._replace(dtype=dtype) for dtype in (BF16, F32, I8)},
    **{f"padded, offsets {at}": PADDED._replace(offsets=at) for at in ((0, 0), (0, 2), (1, 1), (2, 0), (2, 2))},
    "padded, last pixel of an image": PADDED._replace(coord=(0, 2, 2, 0), offsets=(2, 2)),
    "from the middle of an image": WHOLE._replace(coord=(0, 2, 3, 0)),
    "past the last image": PADDED._replace(coord=(1, 2, 1, 0)),
    "beyond the last image": WHOLE._replace(coord=(2, 1, 2, 0)),
    "before the first image": WHOLE._replace(coord=(-1, 2, 1, 0)),
    "corners inside": WHOLE._replace(coord=(0, 1, 1, 0), lower=(1, 1), upper=(-1, -2)),
    "corners outside": WHOLE._replace(coord=(0, -2, -1, 0), lower=(-2, -1), upper=(1, 2), block=(64, 32)),
    "dilated": Pixels((2, 9, 8, 32), (0, -2, -2, 0), (4, 2), (-2, -2), (-2, -2), block=(64, 32)),
    **{f"strided, offsets {at}": STRIDED._replace(offsets=at) for at in ((0, 0), (1, 2))},
    "strided from the middle": STRIDED._replace(coord=(1, 3, 2, 0)),
    "strided by eight": STRIDED._replace(steps=(1, 8, 8, 1), coord=(0, 0, 0, 0), lower=(0, 0), upper=(0, 0)),
    "strided along one axis": STRIDED._replace(steps=(1, 1, 2, 1), block=(64, 32)),
    **{f"channels from {at}": WIDE._replace(coord=(0, 0, 0, at)) for at in (0, 24, 64, 72)},
    "channels in two copies": WIDE._replace(dtype=F32),
    "few channels": WHOLE._replace(block=(32, 8), coord=(0, 0, 0, 16)),
    "channels of wider images": WHOLE._replace(among=48),
    "many pixels": STRIDED._replace(block=(256, 32), steps=()),
    "three axes": Pixels((3, 13, 32), (0, -1, 0), (2,), (-1,), (-1,), (1, 2, 1)),
    "five axes": Pixels((2, 3, 4, 3, 32), (0, -1, 0, -1, 0), (1, 0, 2), (-1, 0, -1), (-1, 0, -1), block=(64, 32)),
    "five axes, strided": Pixels(
        (2, 3, 4, 5, 32), (0, -1, 0, -1, 0), (2, 0, 1), (-1, 0, -1), (-1, 0, -1), (1, 2, 3, 2, 1)
    ),
}


def _moved(
    kernel: object, name: str, axis: int, dtype: torch.dtype, place: gl.dtype, memory: object, device: torch.device
) -> torch.Tensor:
    count = COUNT.value
    x = (torch.arange(count) * 77 % 251 - 125).to(dtype).to(device)
    out = torch.full((count,), 77, dtype=dtype, device=device)
    kernel[(1,)](x, out, name, axis, place, memory)  # type: ignore[index]
    return out.view(ROWS.value, COLUMNS.value)


def _reduced(kind: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Odd numbers meet in the first row: NaN and infinities, or the least and the greatest whole number."""
    generator = torch.Generator().manual_seed(0)
    x, out = ((torch.randn(16, 16, generator=generator) * 10).to(dtype) for _ in range(2))
    if dtype is I32:
        odd = torch.tensor([0, -1, torch.iinfo(I32).max, torch.iinfo(I32).min])
    else:
        odd = torch.tensor([1.5, torch.nan, torch.inf, -torch.inf])
    x[0, :4], x[1, :4] = odd, odd
    out[8, 8:12], out[9, 8:12] = odd, odd.flip(0)
    x, out = x.to(device), out.to(device)
    gluon_reduction_kernels.reduce_kernel[(1,)](x, gluon_reduction_kernels.descriptor(out), kind, True)
    return out


def _pixels(case: Pixels, device: torch.device) -> torch.Tensor:
    *sizes, channels = case.shape
    whole = torch.empty(*sizes, case.among or channels)
    x = (torch.arange(whole.numel()) * 7 % 251 - 125).view(whole.shape).to(case.dtype).to(device)[..., :channels]
    out = torch.full(case.block, 77, dtype=case.dtype, device=device)
    block, layout = list(case.block), gl.NVMMASharedLayout.get_default_for(list(case.block), GLUON[case.dtype])
    described = hopper.TensorDescriptorIm2Col(
        x,
        list(x.shape),
        list(x.stride()),
        block,
        layout,
        element_strides=list(case.steps) or None,
        pixel_box_lower_corner=list(case.lower),
        pixel_box_upper_corner=list(case.upper),
    )
    im2col_kernel[(1,)](
        described, hopper.TensorDescriptor(out, block, list(out.stride()), block, layout), case.coord, case.offsets
    )
    return out


def _lookups() -> Iterator[tuple[str, Run]]:
    for way, kernel in (("gather", gather_kernel), ("scatter", scatter_kernel)):
        for axis in (0, 1):
            for dtype in (I32, F16, BF16, F32, I8):
                run = partial(_moved, kernel, "whole", axis, dtype, gl.int32, PLAIN)
                yield f"shared {way} {dtype} axis {axis}", run
            yield f"shared {way} swizzled axis {axis}", partial(_moved, kernel, "whole", axis, F16, gl.int32, SWIZZLED)
            yield f"shared {way} view axis {axis}", partial(_moved, kernel, "view", axis, F32, gl.int32, PLAIN)
        for place in (gl.int8, gl.int16, gl.int64):
            yield f"shared {way} places {place}", partial(_moved, kernel, "whole", 1, F32, place, PLAIN)
        for name in ("line", "few"):
            yield f"shared {way} {name}", partial(_moved, kernel, name, 1, F32, gl.int32, PLAIN)


def cases() -> Iterator[tuple[str, Run]]:
    """Every case with its name."""
    if hasattr(gl.shared_memory_descriptor, "gather"):
        yield from _lookups()
    if hasattr(gl.shared_memory_descriptor, "atomic_scatter_add"):
        # The broadcasting came with those.
        yield "shared scatter broadcast", partial(_moved, scatter_kernel, "broadcast", 1, F32, gl.int32, PLAIN)
    if hasattr(tma, "async_atomic_add"):
        for kind, dtypes in REDUCED.items():
            for dtype in dtypes:
                yield f"tma reduce {kind} {dtype}", partial(_reduced, kind, dtype)
    if hasattr(tma, "async_load_im2col"):
        for name, case in COPIED.items():
            yield f"im2col {name}", partial(_pixels, case)
