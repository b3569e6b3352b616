"""The one inner loop of convolution and attention: a small matrix product kept in vector registers.

Numba cannot say "these 8 x 2 vectors stay in registers", so this file says it in LLVM's language, which fits it to any
CPU.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mytorch.backends.loops.compiled import private

_AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
# With 32 registers of 64 bytes, 8 rows of 2 vectors leave room for the operands; otherwise there are 16 of 32 bytes, or
# 32 of 16.
VECTOR_BYTES, ROWS = (64, 8) if _AVX512 else (32, 4)


def lanes(dtype: np.dtype) -> int:
    """Elements of a vector."""
    return VECTOR_BYTES // dtype.itemsize


def _pointer(builder, array, strides, index):
    """The address of `array[index, 0]`, by strides in bytes; [index] for one axis."""
    start = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    return builder.gep(start, [builder.mul(index, strides[0])])


def _tile_of(vectors):
    """A function that adds to `out [ROWS, vectors of lanes]` the product of gathered `a [ROWS, K]` and
    `b [K, vectors of lanes]`.
    """

    @intrinsic
    def tile(typing, a, rows, steps, b, out):
        # out[r, :] += sum over k of a[rows[r] + steps[k]] * b[k, :], for ROWS values of r.
        def generate(context, builder, signature, arguments):
            # `multiply`, below, stays a function: copies of it in all who call it took twice the time to compile.
            builder.function.attributes.add("noinline")
            element = context.get_value_type(a.dtype)
            vector = ir.VectorType(element, VECTOR_BYTES * 8 // a.dtype.bitwidth)
            a_, rows_, steps_, b_, out_ = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            b_strides, out_strides = (cgutils.unpack_tuple(builder, x.strides) for x in (b_, out_))
            size = a.dtype.bitwidth // 8

            def place(start, i):
                return builder.gep(builder.bitcast(start, vector.as_pointer()), [ir.Constant(ir.IntType(64), i)])

            def product(x, y, z):
                return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))

            starts, sums = [], []
            for r in range(ROWS):
                index = ir.Constant(ir.IntType(64), r)
                starts.append(builder.gep(a_.data, [builder.load(builder.gep(rows_.data, [index]))]))
                row = _pointer(builder, out_, out_strides, index)
                sums.append([cgutils.alloca_once(builder, vector) for _ in range(vectors)])
                for i, total in enumerate(sums[r]):
                    builder.store(builder.load(place(row, i), align=size), total)
            (count,) = cgutils.unpack_tuple(builder, steps_.shape)
            with cgutils.for_range(builder, count) as loop:
                step = builder.load(builder.gep(steps_.data, [loop.index]))
                row = _pointer(builder, b_, b_strides, loop.index)
                right = [builder.load(place(row, i), align=size) for i in range(vectors)]
                for start, totals in zip(starts, sums, strict=True):
                    one = builder.insert_element(
                        ir.Constant(vector, ir.Undefined), builder.load(builder.gep(start, [step])), ir.IntType(32)(0)
                    )
                    left = builder.shuffle_vector(
                        one,
                        ir.Constant(vector, ir.Undefined),
                        ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None),
                    )
                    for y, total in zip(right, totals, strict=True):
                        builder.store(product(left, y, builder.load(total)), total)
            for r in range(ROWS):
                row = _pointer(builder, out_, out_strides, ir.Constant(ir.IntType(64), r))
                for i, total in enumerate(sums[r]):
                    builder.store(builder.load(total), place(row, i), align=size)
            return context.get_dummy_value()

        return types.void(a, rows, steps, b, out), generate

    return tile


_narrow_tile, _wide_tile = _tile_of(1), _tile_of(2)


@private
def multiply(a, rows, steps, b, out):
    """`out [M, N] += a[rows[:, None] + steps] @ b [K, N]`, where M is whole ROWS and N whole vectors."""
    lane = VECTOR_BYTES // a.itemsize
    for r in range(0, len(rows), ROWS):
        at = 0
        while at + 2 * lane <= b.shape[1]:
            _wide_tile(a, rows[r : r + ROWS], steps, b[:, at:], out[r : r + ROWS, at:])
            at += 2 * lane
        if at < b.shape[1]:
            _narrow_tile(a, rows[r : r + ROWS], steps, b[:, at:], out[r : r + ROWS, at:])
