"""Compiles one kernel for an H200, twice, and one in a process of its own: what benchmarks/compile_log writes down."""

import subprocess
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_one(pointer, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(pointer + offsets, tl.load(pointer + offsets) + 1)


def compile_for(size):
    source = ASTSource(add_one, {"pointer": "*fp32", "N": "constexpr"}, {"N": size})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    if sys.argv[1:]:
        compile_for(int(sys.argv[1]))
    else:
        compile_for(32)
        compile_for(32)
        subprocess.run([sys.executable, __file__, "64"], check=True)
        subprocess.run([sys.executable, __file__, "64"], check=True)
