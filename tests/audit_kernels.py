"""Small kernels, right and wrong at large sizes, for the tests of the audit."""

import triton
import triton.language as tl


@triton.jit
def copy_rows_kernel(x, y, n_rows, stride, WIDE: tl.constexpr, PAST: tl.constexpr, BLOCK: tl.constexpr):
    # Copies column 0: each program walks all rows.
    for i in range(0, n_rows, BLOCK):
        o_r = i + tl.arange(0, BLOCK)
        if WIDE:
            o_r = o_r.to(tl.int64)
        m_r = o_r < n_rows + PAST
        tl.store(y + o_r, tl.load(x + o_r * stride, mask=m_r, other=0.0), mask=m_r)


@triton.jit
def cut_kernel(x, y, number):
    # Cuts a number to 32 bits, and adds two of them without minding what comes of it.
    i = tl.load(x).to(tl.int32)
    tl.store(y, tl.add(number, number, sanitize_overflow=False) + i * 0)
