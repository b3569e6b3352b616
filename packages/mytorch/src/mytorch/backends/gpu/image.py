"""Convolution and pooling of images."""

from typing import Any

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_conv import (
    mytorch_conv2d_grad_input_kernel,
    mytorch_conv2d_grad_weight_kernel,
    mytorch_conv2d_kernel,
)
from mytorch.backends.gpu.kernels_pool import mytorch_max_pool2d_grad_kernel, mytorch_max_pool2d_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, Plan, blocks, plan_elements, plan_launch, planned
from mytorch.backends.gpu.matrix import PRECISIONS, Tile, divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce, plan_parts
from tilewise.ops._host.launching import power_of_2

Pair = tuple[int, int]

# By type and by channels a tile. The steps of tiles of 64 channels are 128 bytes wide: with narrower ones Triton 3.6 on
# Hopper mixes up the layouts of the two operands. fp64 is multiplied element by element.
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
    """As many channels as there are, between the 16 that a matrix product needs and 64."""
    return TILES.get((dtype, min(max(16, power_of_2(channels)), 64)), FP64_TILE)


@planned
def plan_conv2d(dtype: torch.dtype, shape: Shape, weight: Shape, x_strides: Shape, stride: Pair, padding: Pair) -> Plan:
    """For `conv2d` of images of a shape with a weight of another."""
    (n_images, channels, height, width), (n_out, _, *taps) = shape, weight
    rows, columns = (
        (n + 2 * border - tap) // step + 1
        for n, border, tap, step in zip((height, width), padding, taps, stride, strict=True)
    )
    n_pixels, tile = n_images * rows * columns, choose_tile(dtype, n_out)
    tiles_o = blocks(n_out, tile.m)
    fixed = {
        "x_strides": x_strides,
        "O": n_out,
        "K": channels * taps[0] * taps[1],
        "H": height,
        "W": width,
        "P": rows,
        "Q": columns,
        "n_pixels": n_pixels,
        "tiles_o": tiles_o,
    } | shared_options(dtype, tile, weight, stride, padding, n_pixels, tile.n)
    return plan_launch(
        mytorch_conv2d_kernel, tiles_o * blocks(n_pixels, tile.n), fixed, (n_images, n_out, rows, columns), dtype
    )


@planned
def plan_conv2d_grad_input(
    dtype: torch.dtype, grad: Shape, weight: Shape, grad_strides: Shape, shape: Shape, stride: Pair, padding: Pair
) -> Plan:
    """For `conv2d_grad_input`, from the shapes of the result's gradient and the weight."""
    n_images, channels, height, width = shape
    n_pixels, tile = n_images * height * width, choose_tile(dtype, channels)
    tiles_c = blocks(channels, tile.m)
    fixed = {
        "grad_strides": grad_strides,
        "C": channels,
        "K": weight[0] * weight[2] * weight[3],
        "H": height,
        "W": width,
        "P": grad[2],
        "Q": grad[3],
        "n_pixels": n_pixels,
        "tiles_c": tiles_c,
    } | shared_options(dtype, tile, weight, stride, padding, n_pixels, tile.n)
    return plan_launch(mytorch_conv2d_grad_input_kernel, tiles_c * blocks(n_pixels, tile.n), fixed, tuple(shape), dtype)


@planned
def plan_conv2d_grad_weight(
    dtype: torch.dtype,
    grad: Shape,
    x: Shape,
    grad_strides: Shape,
    x_strides: Shape,
    shape: Shape,
    stride: Pair,
    padding: Pair,
) -> tuple[Plan, ...]:
    """For `conv2d_grad_weight`, from the shapes of the result's gradient and the images."""
    channels, length = shape[0], shape[1] * shape[2] * shape[3]
    n_pixels, tile = grad[0] * grad[2] * grad[3], choose_tile(dtype, channels)
    tiles_o, tiles_n = blocks(channels, tile.m), blocks(length, tile.n)
    parts, chunk = divide(tiles_o * tiles_n, n_pixels, tile.k)
    fixed = {
        "grad_strides": grad_strides,
        "x_strides": x_strides,
        "O": channels,
        "N": length,
        "H": x[2],
        "W": x[3],
        "P": grad[2],
        "Q": grad[3],
        "n_pixels": n_pixels,
        "chunk": chunk,
        "tiles_o": tiles_o,
        "tiles_n": tiles_n,
    } | shared_options(dtype, tile, shape, stride, padding, n_pixels, max(tile.n, chunk))
    return plan_parts(mytorch_conv2d_grad_weight_kernel, tiles_o * tiles_n, fixed, shape, dtype, parts)


def shared_options(
    dtype: torch.dtype, tile: Tile, weight: Shape, stride: Pair, padding: Pair, n_pixels: int, beyond: int
) -> dict[str, Any]:
    """What all three convolutions take; pixels are numbered up to so many beyond the last."""
    return {
        "KH": weight[2],
        "KW": weight[3],
        "SH": stride[0],
        "SW": stride[1],
        "PH": padding[0],
        "PW": padding[1],
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "ACC": ACCUMULATORS[dtype],
        "PRECISION": PRECISIONS.get(dtype),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "WIDE": n_pixels >= 2**31 - beyond,
    }


@planned
def plan_max_pool2d(dtype: torch.dtype, shape: Shape, x_strides: Shape, size: Pair, stride: Pair) -> Plan:
    """For `max_pool2d` of images of a shape."""
    n_images, channels, height, width = shape
    rows, columns = (height - size[0]) // stride[0] + 1, (width - size[1]) // stride[1] + 1
    image = {"C": channels, "W": width, "P": rows, "Q": columns}
    window = {"KH": size[0], "KW": size[1], "SH": stride[0], "SW": stride[1]}
    return plan_elements(
        mytorch_max_pool2d_kernel, (n_images, channels, rows, columns), dtype, x_strides=x_strides, **image, **window
    )


@planned
def plan_max_pool2d_grad(dtype: torch.dtype, grad: Shape, shape: Shape, size: Pair, stride: Pair) -> Plan:
    """For `max_pool2d_grad`, from the shapes of the result's gradient and the images."""
    image = {"H": shape[2], "W": shape[3], "P": grad[2], "Q": grad[3], "SH": stride[0], "SW": stride[1]}
    reach = {"reach_h": blocks(size[0], stride[0]), "reach_w": blocks(size[1], stride[1])}
    return plan_elements(mytorch_max_pool2d_grad_kernel, shape, dtype, ACC=ACCUMULATORS[dtype], **image, **reach)


class Image(Reduce, Memory):
    """The protocol's operations on images."""

    def conv2d(self, x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
        plan = plan_conv2d(x.dtype, x.shape, weight.shape, x.stride(), stride, padding)
        return self._result(
            plan, x=x, weight=self.contiguous(weight), bias=bias if bias is None else self.contiguous(bias)
        )

    def conv2d_grad_input(self, grad: Array, weight: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        plan = plan_conv2d_grad_input(grad.dtype, grad.shape, weight.shape, grad.stride(), shape, stride, padding)
        return self._result(plan, grad=grad, weight=self.contiguous(weight))

    def conv2d_grad_weight(self, grad: Array, x: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        plans = plan_conv2d_grad_weight(
            grad.dtype, grad.shape, x.shape, grad.stride(), x.stride(), shape, stride, padding
        )
        return self._results(plans, grad=grad, x=x)

    def max_pool2d(self, x: Array, size: Pair, stride: Pair) -> tuple[Array, Array]:
        plan = plan_max_pool2d(x.dtype, x.shape, x.stride(), size, stride)
        where = self._empty(plan.shape, torch.int64)
        return self._result(plan, x=x, where=where), where

    def max_pool2d_grad(self, grad: Array, where: Array, shape: Shape, size: Pair, stride: Pair) -> Array:
        plan = plan_max_pool2d_grad(grad.dtype, grad.shape, shape, size, stride)
        return self._result(plan, grad=self.contiguous(grad), where=self.contiguous(where))
