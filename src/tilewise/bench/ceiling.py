"""What this machine can do at all, measured in the same run: a large matrix product and a large copy."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.bench.timing import Clock

# Rows and columns of the product, bytes of the copy, and how often each is tried.
MATRIX = {"cuda": 8192, "cpu": 2048}
COPIED = {"cuda": 1 << 30, "cpu": 256 << 20}
TRIES = 10


@dataclass(frozen=True)
class Ceiling:
    """TFLOP/s of a product in `dtype`, and GB/s of a copy, bytes read and bytes written both counted; the best of
    several tries.
    """

    tflops: float
    gbps: float
    dtype: str


def measure(device: torch.device, dtype: torch.dtype, clock: Clock) -> Ceiling:
    """On a CPU the product is fp32's, in which its backends compute."""
    dtype = dtype if device.type == "cuda" else torch.float32
    size = MATRIX[device.type]
    # Random numbers: zeros draw less power, and run faster.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(-128, 128, (COPIED[device.type],), dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def best(call: object) -> float:
        assert callable(call)
        clock.run([call], 3)
        return min(clock.run([call], TRIES))

    return Ceiling(
        2 * size**3 / best(lambda: torch.matmul(a, b, out=product)) / 1e9,
        2 * source.numel() / best(lambda: target.copy_(source)) / 1e6,
        str(dtype).removeprefix("torch."),
    )


@contextlib.contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Inside, a GPU is at work, so that the clocks it is asked for are those it runs at."""
    ended = threading.Event()

    def work() -> None:
        a = torch.randn(MATRIX["cuda"], MATRIX["cuda"], device=device, dtype=torch.bfloat16)
        product = torch.empty_like(a)
        while not ended.is_set():
            torch.matmul(a, a, out=product)
            torch.cuda.synchronize(device)

    worker = threading.Thread(target=work)
    if device.type == "cuda":
        worker.start()
        # Long enough for clocks to rise.
        time.sleep(0.5)
    yield
    ended.set()
    if device.type == "cuda":
        worker.join()
