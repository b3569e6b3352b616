"""Kernels that show what Triton's interpreter makes of bf16; run by test_interpreter.py as
`interpreter_kernels.py CHECK,CHECK REPAIRED`.
"""

import sys
import threading
import warnings

import torch
import triton
import triton.language as tl

SIZE = 16


@triton.jit
def arithmetic_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.load(x + o) * tl.load(y + o) + tl.load(z + o))


@triton.jit
def rounding_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, (tl.load(x + o).to(tl.float32) * 1.005859375).to(tl.bfloat16))


@triton.jit
def fma_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.fma(tl.load(x + o), tl.load(y + o), tl.load(z + o)))


@triton.jit
def dot_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + o, tl.dot(tl.load(x + o), tl.load(y + o)))


@triton.jit
def sum_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.zeros([SIZE], tl.bfloat16) + tl.sum(tl.load(x + o)))


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def scan_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.associative_scan(tl.load(x + o), 0, plus))


@triton.jit
def cumsum_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.cumsum(tl.load(x + o)))


@triton.jit
def constant_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.full([SIZE], 1.5, tl.bfloat16) + tl.load(x + o))


@triton.jit
def where_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.where(tl.load(x + o) > tl.load(y + o), tl.load(x + o), tl.load(z + o)))


@triton.jit
def range_kernel(x, y, z, out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    b = tl.zeros([SIZE], tl.float32)
    for i in range(tl.program_id(0), tl.program_id(0) + 3):
        b += tl.load(x + o).to(tl.float32) * i
    tl.store(out + o, b)


@triton.jit
def types_kernel(x, y, z, out, SIZE: tl.constexpr):
    # The last number of int32 wraps around, as on a GPU; an int64 of the same shape does not.
    o = tl.arange(0, SIZE)
    narrow = tl.full([SIZE], 2147483647, tl.int32) + 1
    wide = tl.full([SIZE], 2147483647, tl.int64) + 1
    tl.static_assert(narrow.dtype == tl.int32)
    tl.static_assert(wide.dtype == tl.int64)
    tl.static_assert(wide.dtype != tl.int32)
    tl.static_assert(tl.zeros([SIZE, 2], tl.int32).numel == 2 * SIZE)
    tl.static_assert(tl.zeros([2, SIZE], tl.int32).shape[0] == 2)
    parity = tl.load(x + o).to(tl.float32) * 0 + (wide + narrow)
    tl.store(out + o, parity + tl.sum(tl.zeros([SIZE, 2], tl.float32) + 1.0))


@triton.jit
def warnings_kernel(x, y, z, out, SIZE: tl.constexpr):
    # Past fp32's largest number.
    o = tl.arange(0, SIZE)
    tl.store(out + o, tl.full([SIZE], 3e38, tl.float32) * 2.0)


@triton.jit
def place(o):
    # A helper, for the language is patched again for each.
    return o + tl.program_id(0)


@triton.jit
def programs_kernel(out, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    for i in range(SIZE):
        tl.store(out + tl.program_id(0) * SIZE + o, place(o) + tl.num_programs(0), mask=o == i)


def check_threads() -> bool:
    """Launches of two threads, of different grids, side by side; each writes numbers that tell its program and grid."""
    sys.setswitchinterval(1e-5)
    found = {}

    def launch(programs: int) -> None:
        for _ in range(3):
            out = torch.zeros(programs, SIZE, dtype=torch.int32)
            programs_kernel[(programs,)](out, SIZE=SIZE)
            want = torch.arange(programs)[:, None] + torch.arange(SIZE) + programs
            found.setdefault(programs, []).append(torch.equal(out.long(), want))

    threads = [threading.Thread(target=launch, args=(programs,)) for programs in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [len(found.get(programs, [])) for programs in (3, 5)] == [3, 3] and all(map(all, found.values()))


def expected(check: str, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    row = slice(0, SIZE)
    a, b, c = x.flatten()[row], y.flatten()[row], z.flatten()[row]
    if check in ("scan", "cumsum"):
        return a.double().cumsum(0)
    results = {
        "arithmetic": lambda: a * b + c,
        "rounding": lambda: (a.float() * 1.005859375).bfloat16(),
        "fma": lambda: (a.double() * b.double() + c.double()).bfloat16(),
        "dot": lambda: x.float() @ y.float(),
        "sum": lambda: a.float().sum().bfloat16().expand(SIZE),
        "constant": lambda: a + 1.5,
        "where": lambda: torch.where(a > b, a, c),
        "range": lambda: a.float() * 3,
        "warnings": lambda: torch.full((SIZE,), torch.inf),
        "types": lambda: torch.full((SIZE,), 2.0 * SIZE),
    }
    return results[check]()


def run(check: str) -> bool:
    if check == "threads":
        return check_threads()
    if check == "warnings":
        warnings.simplefilter("error")
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(SIZE, SIZE, generator=generator).bfloat16() for _ in range(3))
    want = expected(check, x, y, z)
    out = torch.empty(
        want.shape, dtype=torch.float32 if check in ("dot", "range", "types", "warnings") else torch.bfloat16
    )
    globals()[f"{check}_kernel"][(1,)](x, y, z, out, SIZE=SIZE)
    # Element-wise work agrees bit for bit; sums may differ in their order, a running sum in bf16 by one rounding.
    tolerance = {"dot": 1e-5, "range": 1e-6, "sum": 1e-6, "scan": 2**-8, "cumsum": 2**-8}.get(check, 0.0)
    return torch.allclose(out.double(), want.double(), rtol=tolerance, atol=tolerance)


def main(checks: str, repaired: str) -> None:
    if repaired == "1":
        from tilewise import interpreter

        interpreter.repair()
    for check in checks.split(","):
        print(check, "right" if run(check) else "wrong")


main(*sys.argv[1:])
