"""The one inner loop of convolution and attention: a small matrix product kept in vector registers.

Numba cannot say "these 8 x 3 vectors stay in registers", so this file says it in LLVM's language, which fits it to any
CPU.
"""

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mytorch.backends.loops.compiled import private

_AVX512 = bool(binding.get_host_cpu_features().get("avx512f"))
# With 32 registers of 64 bytes, 8 rows of 3 vectors leave room for the operands; otherwise there are 16 of 32 bytes, or
# 32 of 16.
VECTOR_BYTES, ROWS = (64, 8) if _AVX512 else (32, 4)
# Vectors of a row that are kept in registers: the more, the fewer instructions a product takes.
PANEL = 3
# Vectors of a row of a tile of scores, and their bytes: two panels, for what is looped over is read once for both.
VECTORS = 2 * PANEL
ROW_BYTES = VECTORS * VECTOR_BYTES


def lanes(dtype: np.dtype) -> int:
    """Elements of a vector."""
    return VECTOR_BYTES // dtype.itemsize


def splat(builder, value, vector):
    """A vector of one number."""
    nothing = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _product(adds):
    """The product's instructions: out is added to, or written."""

    @intrinsic
    def emit(typing, a, rows, steps, b, out):
        def generate(context, builder, signature, arguments):
            # The two functions below stay functions: copies of them in all who call took twice the time to compile.
            builder.function.attributes.add("noinline")
            element = context.get_value_type(a.dtype)
            size = a.dtype.bitwidth // 8
            vector = ir.VectorType(element, VECTOR_BYTES // size)
            a_, rows_, steps_, b_, out_ = (
                context.make_array(kind)(context, builder, value)
                for kind, value in zip(signature.args, arguments, strict=True)
            )
            (b_stride, _), (out_stride, _) = (cgutils.unpack_tuple(builder, x.strides) for x in (b_, out_))
            (n_rows,), (n_steps,) = (cgutils.unpack_tuple(builder, x.shape) for x in (rows_, steps_))
            _, n_columns = cgutils.unpack_tuple(builder, out_.shape)

            def number(value):
                return ir.Constant(n_rows.type, value)

            def row(array, stride, index, column):
                start = builder.bitcast(array.data, ir.IntType(8).as_pointer())
                start = builder.gep(start, [builder.add(builder.mul(index, stride), builder.mul(column, number(size)))])
                return builder.bitcast(start, vector.as_pointer())

            def add_product(x, y, total):
                return builder.fadd(builder.fmul(x, y, flags=("contract",)), total, flags=("contract",))

            def tile(first, column, vectors):
                """ROWS and some vectors of the result, in registers from end to end."""
                starts, places, totals = [], [], []
                for r in range(ROWS):
                    index = builder.add(first, number(r))
                    starts.append(builder.gep(a_.data, [builder.load(builder.gep(rows_.data, [index]))]))
                    begin = row(out_, out_stride, index, column)
                    for i in range(vectors):
                        places.append(builder.gep(begin, [number(i)]))
                        totals.append(cgutils.alloca_once(builder, vector))
                        before = builder.load(places[-1], align=size) if adds else ir.Constant(vector, None)
                        builder.store(before, totals[-1])
                with cgutils.for_range(builder, n_steps) as loop:
                    step = builder.load(builder.gep(steps_.data, [loop.index]))
                    begin = row(b_, b_stride, loop.index, column)
                    right = [builder.load(builder.gep(begin, [number(i)]), align=size) for i in range(vectors)]
                    for r, start in enumerate(starts):
                        left = splat(builder, builder.load(builder.gep(start, [step])), vector)
                        for y, total in zip(right, totals[r * vectors :], strict=False):
                            builder.store(add_product(left, y, builder.load(total)), total)
                for place, total in zip(places, totals, strict=True):
                    builder.store(builder.load(total), place, align=size)

            # Panels of three vectors; a single one left over makes the last two panels two vectors wide.
            n_vectors, lane = builder.udiv(n_columns, number(vector.count)), number(vector.count)
            rest = builder.urem(n_vectors, number(PANEL))
            halves = builder.and_(
                builder.icmp_signed("==", rest, number(1)), builder.icmp_signed(">", n_vectors, number(1))
            )
            wide = builder.sub(builder.udiv(n_vectors, number(PANEL)), builder.zext(halves, n_rows.type))
            pairs = builder.select(halves, number(2), builder.udiv(rest, number(2)))
            single = builder.sub(
                n_vectors, builder.add(builder.mul(wide, number(PANEL)), builder.mul(pairs, number(2)))
            )
            column = number(0)
            for vectors, count in ((PANEL, wide), (2, pairs), (1, single)):
                width = builder.mul(lane, number(vectors))
                with cgutils.for_range(builder, count) as panel:
                    at = builder.add(column, builder.mul(panel.index, width))
                    with cgutils.for_range(builder, builder.udiv(n_rows, number(ROWS))) as block:
                        tile(builder.mul(block.index, number(ROWS)), at, vectors)
                column = builder.add(column, builder.mul(count, width))
            return context.get_dummy_value()

        return types.void(a, rows, steps, b, out), generate

    return emit


_add_product, _write_product = _product(adds=True), _product(adds=False)


@private
def multiply(a, rows, steps, b, out):
    """`out [M, N] += a[rows[:, None] + steps] @ b [K, N]`, where M is whole ROWS and N whole vectors."""
    _add_product(a, rows, steps, b, out)


@private
def product(a, rows, steps, b, out):
    """The same without what out was: `out = ...`."""
    _write_product(a, rows, steps, b, out)


def fold_rows(step):
    """A function that goes down the rows of `x [:count, VECTORS]`, what it keeps of a lane in registers:
    `x[r], kept = step(x[r], given, kept)`, with `given` and `kept [VECTORS]`.
    """

    @intrinsic
    def fold(typing, x, count, given, kept):
        def generate(context, builder, signature, arguments):
            size = x.dtype.bitwidth // 8
            vector = ir.VectorType(context.get_value_type(x.dtype), VECTOR_BYTES // size)
            x_, given_, kept_ = (
                builder.bitcast(
                    context.make_array(signature.args[i])(context, builder, arguments[i]).data, vector.as_pointer()
                )
                for i in (0, 2, 3)
            )

            def place(start, i):
                return builder.gep(start, [i if isinstance(i, ir.Value) else ir.Constant(ir.IntType(64), i)])

            values = [builder.load(place(given_, i), align=size) for i in range(VECTORS)]
            totals = [cgutils.alloca_once(builder, vector) for _ in range(VECTORS)]
            for i, total in enumerate(totals):
                builder.store(builder.load(place(kept_, i), align=size), total)
            with cgutils.for_range(builder, arguments[1]) as loop:
                row = place(x_, builder.mul(loop.index, ir.Constant(loop.index.type, VECTORS)))
                for i, (value, total) in enumerate(zip(values, totals, strict=True)):
                    found, left = step(builder, builder.load(place(row, i), align=size), value, builder.load(total))
                    builder.store(found, place(row, i), align=size)
                    builder.store(left, total)
            for i, total in enumerate(totals):
                builder.store(builder.load(total), place(kept_, i), align=size)
            return context.get_dummy_value()

        return types.void(x, count, given, kept), generate

    return fold
