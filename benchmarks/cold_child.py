"""One operator's first calls in a process of its own: benchmarks/cold.py starts it, and reads the JSON that it prints.

python benchmarks/cold_child.py OPERATOR [--meet FOLDER] [--after-first-kernel]
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import pin_timer
from host import own_stdout

OPERATORS = {
    "flash": "flash_attention",
    "nsa": "native_sparse_attention",
    "hstu": "hstu_attention",
    "bsa": "block_sparse_attn",
}
FLASH_SHAPE, NSA_TOKENS = (1, 4096, 16, 128), 4096
HSTU_SHAPE = (8, 4096, 4, 128, 128)


def attention(operator: str) -> Any:
    """The operator's standard problem, with grad."""
    import torch

    # Another version's timer may not have what the cases import.
    pin_timer()
    from host_cases import nsa
    from hstu import Attention, Batch, dense, sparse

    import tilewise

    if operator == "flash":
        q, k, v, do = (torch.randn(FLASH_SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        return Attention(lambda: tilewise.flash_attention(*leaves, causal=True), leaves, do)
    if operator == "nsa":
        return nsa(NSA_TOKENS, "cuda", grad=True)
    batch = Batch(HSTU_SHAPE, jagged=False)
    return dense(batch) if operator == "hstu" else sparse(batch)


def meet(folder: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Say that this rank is ready, and wait until all are."""
    (folder / f"ready-{os.getpid()}").touch()
    while not (folder / "go").exists():
        wait(0.005)


def phase(call: Callable[[], Any], synchronize: Callable[[], object]) -> tuple[Any, dict[str, Any]]:
    """What the call returns; seconds until the device is idle, modules imported meanwhile, and when it ended."""
    before, begin = set(sys.modules), time.perf_counter()
    result = call()
    synchronize()
    seconds = time.perf_counter() - begin
    return result, {"seconds": seconds, "imported": sorted(set(sys.modules) - before), "at": time.time()}


def backward_of_torch() -> None:
    """A backward without us: the first one with a given gradient makes torch import sympy, in torch's own time."""
    import torch

    x = torch.ones(1, device="cuda", requires_grad=True)
    torch.autograd.grad(2 * x, x, torch.ones_like(x))


def compile_first() -> None:
    """A kernel that does next to nothing: compiled first, it takes what a process pays once for all of its kernels.

    Triton hashes its own 400 MB library and imports its code generator inside the first compilation.
    """
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def first_kernel(pointer):
        tl.store(pointer, 1)

    first_kernel[(1,)](torch.empty(1, device="cuda", dtype=torch.int32))
    torch.cuda.synchronize()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--meet", type=Path, metavar="FOLDER", help="where ranks that start together meet")
    parser.add_argument("--after-first-kernel", action="store_true", help="compile a kernel of no size first")
    return parser.parse_args()


def main() -> None:
    """Print the figures of each phase as one line of JSON."""
    given, answers = arguments(), own_stdout()
    began = time.perf_counter()
    import torch

    import tilewise

    getattr(tilewise, OPERATORS[given.operator])
    imported = time.perf_counter() - began
    subject, synchronize = attention(given.operator), torch.cuda.synchronize
    backward_of_torch()
    synchronize()
    if given.after_first_kernel:
        compile_first()
    if given.meet:
        meet(given.meet)
    phases: dict[str, dict[str, Any]] = {"imports": {"seconds": imported}}
    o, phases["forward"] = phase(subject.attend, synchronize)
    _, phases["backward"] = phase(lambda: torch.autograd.grad(o, subject.leaves, subject.do), synchronize)
    # A second and a third step: the second must not stall, the third says what a step takes.
    for name in ("second", "third"):
        _, phases[name] = phase(subject.step, synchronize)
    print(json.dumps(phases), file=answers, flush=True)


if __name__ == "__main__":
    main()
