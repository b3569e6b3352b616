"""How much memory a call takes at its peak."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A matrix of T² elements has at least a byte for each; half of that is no rounding of an allocator.
SQUARE_BYTES = 0.5
# An allocation that opens a profile, of a size that no tensor has: what is in use after it was in use before.
FIRST_BYTES = 100_003


def grows_as_square(peaks: list[int], tokens: int) -> bool:
    """Whether peaks at T, 2T and 4T tokens hold a part that grows as T²: their second difference is that
    part's alone.
    """
    one, two, four = peaks
    square = ((four - two) - 2 * (two - one)) / 6
    return square > SQUARE_BYTES * tokens**2


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that torch allocates while `call` runs, at the most at once."""
    with _no_collection():
        return _peak(call, device)


def _peak(call: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    threads = torch.get_num_threads()
    # Longer inputs occupy more threads, each with memory of its own: that is not growth of the method.
    torch.set_num_threads(1)
    try:
        with _profile() as profile:
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            call()
            del first
    finally:
        torch.set_num_threads(threads)
    # The allocator's own totals: by their times, which a busy machine mixes up, events would not add up.
    totals = _totals(profile)
    return max(totals.values()) - totals[FIRST_BYTES]


def _totals(profile: Any) -> dict[int, int]:
    """By the size of an allocation on the CPU, the most bytes that were in use after one of that size."""
    from torch._C._profiler import _EventType

    most: dict[int, int] = {}
    events = list(profile.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == _EventType.Allocation:
            size, total = event.extra_fields.alloc_size, event.extra_fields.total_allocated
            most[size] = max(total, most.get(size, total))
    return most


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What earlier calls left in cycles is gone, and what the call leaves stays: else the peak would depend on when
    Python collects.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _profile() -> Iterator[Any]:
    """torch's profiler of memory, without the messages that it writes past Python as it starts and stops."""
    profile = torch.autograd.profiler.profile(profile_memory=True)
    with _no_output():
        profile.__enter__()
    try:
        yield profile
    finally:
        with _no_output():
            profile.__exit__(None, None, None)


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """For the whole process, and so for a moment only: what other threads print meanwhile is lost."""
    saved = [os.dup(number) for number in (1, 2)]
    with open(os.devnull, "wb") as nowhere:
        for number in (1, 2):
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
