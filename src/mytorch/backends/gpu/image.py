"""Convolution and pooling of images."""

from typing import Any

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_conv import mytorch_conv2d_grad_input_kernel, mytorch_conv2d_grad_weight_kernel, mytorch_conv2d_kernel
from mytorch.backends.gpu.kernels_pool import mytorch_max_pool2d_grad_kernel, mytorch_max_pool2d_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, blocks, wide
from mytorch.backends.gpu.matrix import PRECISIONS, Tile, divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce
from tilewise.ops._host.launching import power_of_2

Pair = tuple[int, int]

# By type and by channels a tile. The steps of tiles of 64 channels are 128 bytes wide: with narrower ones Triton 3.6 on Hopper mixes up the layouts
# of the two sides. fp64 is multiplied element by element.
TILES = {
    (torch.float16, 16): Tile(16, 128, 32, 8, 3),
    (torch.float16, 32): Tile(32, 64, 32, 4, 3),
    (torch.float16, 64): Tile(64, 64, 64, 8, 3),
    (torch.float32, 16): Tile(16, 128, 32, 8, 3),
    (torch.float32, 32): Tile(32, 64, 32, 8, 3),
    (torch.float32, 64): Tile(64, 64, 32, 4, 3),
}
FP64_TILE = Tile(32, 32, 16, 8, 1)


def choose_tile(dtype: torch.dtype, channels: int) -> Tile:
    """As many channels as there are, between the 16 that a matrix product wants and 64."""
    return TILES.get((dtype, min(max(16, power_of_2(channels)), 64)), FP64_TILE)


class Image(Reduce, Memory):
    """The protocol's operations on images."""

    def conv2d(self, x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
        (n_images, _, height, width), (channels, _, *taps) = x.shape, weight.shape
        rows, columns = ((n + 2 * border - tap) // step + 1 for n, border, tap, step in zip((height, width), padding, taps, stride, strict=True))
        out = self._empty((n_images, channels, rows, columns), x.dtype)
        n_pixels, tile = n_images * rows * columns, choose_tile(x.dtype, channels)
        tiles_o = blocks(channels, tile.m)
        self._convolve(
            mytorch_conv2d_kernel,
            tiles_o * blocks(n_pixels, tile.n),
            tile,
            weight.shape,
            stride,
            padding,
            x=x,
            weight=self._contiguous(weight),
            bias=bias if bias is None else self._contiguous(bias),
            out=out,
            x_strides=x.stride(),
            O=channels,
            K=weight.shape[1] * taps[0] * taps[1],
            H=height,
            W=width,
            P=rows,
            Q=columns,
            n_pixels=n_pixels,
            tiles_o=tiles_o,
        )
        return out

    def conv2d_grad_input(self, grad: Array, weight: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        out = self._empty(shape, grad.dtype)
        n_images, channels, height, width = shape
        n_pixels, tile = n_images * height * width, choose_tile(grad.dtype, channels)
        tiles_c = blocks(channels, tile.m)
        self._convolve(
            mytorch_conv2d_grad_input_kernel,
            tiles_c * blocks(n_pixels, tile.n),
            tile,
            weight.shape,
            stride,
            padding,
            grad=grad,
            weight=self._contiguous(weight),
            out=out,
            grad_strides=grad.stride(),
            C=channels,
            K=weight.shape[0] * weight.shape[2] * weight.shape[3],
            H=height,
            W=width,
            P=grad.shape[2],
            Q=grad.shape[3],
            n_pixels=n_pixels,
            tiles_c=tiles_c,
        )
        return out

    def conv2d_grad_weight(self, grad: Array, x: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        channels, length = shape[0], shape[1] * shape[2] * shape[3]
        n_pixels, tile = grad.shape[0] * grad.shape[2] * grad.shape[3], choose_tile(grad.dtype, channels)
        tiles_o, tiles_n = blocks(channels, tile.m), blocks(length, tile.n)
        parts, chunk = divide(tiles_o * tiles_n, n_pixels, tile.k)
        out = self._empty(shape, grad.dtype) if parts == 1 else self._empty((parts, *shape), wide(grad.dtype))
        self._convolve(
            mytorch_conv2d_grad_weight_kernel,
            tiles_o * tiles_n * parts,
            tile,
            shape,
            stride,
            padding,
            grad=grad,
            x=x,
            out=out,
            grad_strides=grad.stride(),
            x_strides=x.stride(),
            O=channels,
            N=length,
            H=x.shape[2],
            W=x.shape[3],
            P=grad.shape[2],
            Q=grad.shape[3],
            n_pixels=n_pixels,
            chunk=chunk,
            tiles_o=tiles_o,
            tiles_n=tiles_n,
        )
        return out if parts == 1 else self._sum_parts(out, grad.dtype)

    def _convolve(self, kernel: Any, grid: int, tile: Tile, taps: Shape, stride: Pair, padding: Pair, /, **arguments: Any) -> None:
        """Launch one of the three, with what all of them take."""
        self._launch(
            kernel,
            grid,
            KH=taps[-2],
            KW=taps[-1],
            SH=stride[0],
            SW=stride[1],
            PH=padding[0],
            PW=padding[1],
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            ACC=ACCUMULATORS[arguments["out"].dtype],
            PRECISION=PRECISIONS.get(arguments["out"].dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            # Numbers up to a part beyond the last pixel are computed.
            WIDE=arguments["n_pixels"] >= 2**31 - max(tile.n, arguments.get("chunk", 0)),
            **arguments,
        )

    def max_pool2d(self, x: Array, size: Pair, stride: Pair) -> tuple[Array, Array]:
        n_images, channels, height, width = x.shape
        rows, columns = (height - size[0]) // stride[0] + 1, (width - size[1]) // stride[1] + 1
        out = self._empty((n_images, channels, rows, columns), x.dtype)
        where = self._empty(out.shape, torch.int64)
        self._launch_by_elements(
            mytorch_max_pool2d_kernel,
            out.numel(),
            x=x,
            out=out,
            where=where,
            x_strides=x.stride(),
            C=channels,
            W=width,
            P=rows,
            Q=columns,
            KH=size[0],
            KW=size[1],
            SH=stride[0],
            SW=stride[1],
        )
        return out, where

    def max_pool2d_grad(self, grad: Array, where: Array, shape: Shape, size: Pair, stride: Pair) -> Array:
        height, width = shape[2:]
        rows, columns = grad.shape[2:]
        out = self._empty(shape, grad.dtype)
        self._launch_by_elements(
            mytorch_max_pool2d_grad_kernel,
            out.numel(),
            grad=self._contiguous(grad),
            where=self._contiguous(where),
            out=out,
            H=height,
            W=width,
            P=rows,
            Q=columns,
            SH=stride[0],
            SW=stride[1],
            reach_h=blocks(size[0], stride[0]),
            reach_w=blocks(size[1], stride[1]),
            ACC=ACCUMULATORS[grad.dtype],
        )
        return out
