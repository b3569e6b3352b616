"""Watches fresh memory: every tensor that Python code allocates holds NaN until written, and has guards that show an
out-of-bounds write.

Measures a call's peak memory.
"""

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch

from tilewise.ops._host import backend
from tilewise.verify.suite import GUARD

# torch's functions that return fresh memory, and whether the caller is to fill it.
_FACTORIES = {
    torch: {
        "empty": True,
        "empty_like": True,
        "empty_strided": True,
        "zeros": False,
        "zeros_like": False,
        "full": False,
        "full_like": False,
    },
    torch.Tensor: {"new_empty": True, "new_empty_strided": True, "new_zeros": False, "new_full": False},
}
_installing = threading.Lock()
_originals: list[tuple[Any, str, Any]] = []
# The active ones, of all threads.
_watches: list["Watch"] = []


class Watch:
    """Inside `with Watch() as watch`, allocations of this thread are watched, and those of a backward in torch's own
    threads; Python's other threads are not. `fill` is what unwritten memory holds.
    """

    def __init__(self, fill: float = torch.nan) -> None:
        self._fill = fill
        self._allocations: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(backend.watching())
        _install(self)
        return self

    def __exit__(self, *_: object) -> None:
        _uninstall(self)
        self._stack.close()

    def overrun(self) -> str:
        """Writes beyond the ends of an allocation; empty if there were none."""
        for memory, span, shape in self._allocations:
            if memory.untyped_storage().nbytes() != memory.numel() * memory.element_size():
                # Resized, by `out=` for example: its guards went with its old memory.
                continue
            bits = memory.view(torch.uint8).reshape(-1, memory.element_size())
            untouched = _pattern(memory, self._fill)[:1].view(torch.uint8)
            changed = (bits != untouched).any(-1)
            before, after = int(changed[:GUARD].sum()), int(changed[GUARD + span :].sum())
            if before or after:
                return f"{before} elements before and {after} after a tensor of shape {list(shape)} were written"
        return ""

    def guard(self, fresh: torch.Tensor, unwritten: bool) -> torch.Tensor:
        """The same tensor in memory with guards, unwritten or with its values."""
        shape, strides = fresh.shape, fresh.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if fresh.numel() else 0
        # The pattern is made from the fresh tensor by an operation that is not watched itself.
        memory = _pattern(fresh, self._fill).expand(span + 2 * GUARD).contiguous()
        values = fresh.detach().clone()
        with torch.no_grad():
            fresh.set_(memory.untyped_storage(), GUARD, shape, strides)
            if not unwritten:
                fresh.copy_(values)
        self._allocations.append((memory, span, tuple(shape)))
        return fresh


def _current() -> Watch | None:
    """The watch of this thread; in an autograd thread, which belongs to no one, the newest of all."""
    ident = threading.get_ident()
    found = next((watch for watch in reversed(_watches) if watch._thread == ident), None)
    if found is None and _watches and torch._C._current_graph_task_id() >= 0 and not _is_python_s(ident):
        return _watches[-1]
    return found


def _is_python_s(ident: int) -> bool:
    """Whether a thread was made by Python: torch's own are known to it as dummies, if at all."""
    return any(
        thread.ident == ident and not isinstance(thread, threading._DummyThread) for thread in threading.enumerate()
    )


def _install(watch: Watch) -> None:
    """While any watch is active, torch's factories look it up. Watches of threads may overlap: the last one removes the
    hook.
    """
    with _installing:
        _watches.append(watch)
        if len(_watches) > 1:
            return
        for owner, names in _FACTORIES.items():
            for name, unwritten in names.items():
                _originals.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, _watched(getattr(owner, name), unwritten))


def _uninstall(watch: Watch) -> None:
    with _installing:
        _watches.remove(watch)
        if not _watches:
            for owner, name, original in _originals:
                if original is None:
                    # It came from a base class.
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)
            _originals.clear()


def _watched(original: Callable[..., torch.Tensor], unwritten: bool) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def allocate(*arguments: Any, **named: Any) -> torch.Tensor:
        fresh = original(*arguments, **named)
        # Not while torch.compile traces: it cannot read thread-local state.
        watch = None if torch.compiler.is_compiling() else _current()
        if watch is None or not _is_plain(fresh) or named.get("pin_memory") or named.get("out") is not None:
            return fresh
        return watch.guard(fresh, unwritten)

    allocate.is_watch = True  # type: ignore[attr-defined]
    return allocate


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x is an ordinary tensor with its own memory: not one that torch.compile or a fake mode traces with."""
    if type(x) is not torch.Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active() or x.numel() == 0:
        return False
    return (
        x.layout == torch.strided and x.device.type in ("cpu", "cuda") and not x.is_complex() and x.dtype != torch.bool
    )


def _pattern(x: torch.Tensor, fill: float) -> torch.Tensor:
    """One element of unwritten memory of x's dtype: `fill`, or the largest value for integers."""
    value = fill if x.is_floating_point() else torch.iinfo(x.dtype).max if fill != 0 else 0
    return torch.scalar_tensor(value, dtype=x.dtype, device=x.device).reshape(1)


# A matrix of T² elements takes at least a byte each; half of that is more than an allocator's rounding.
SQUARE_BYTES = 0.5
# An allocation that opens a profile, of a size that no tensor has: what is in use after it was in use before.
FIRST_BYTES = 100_003


def grows_as_square(peaks: list[int], tokens: int) -> bool:
    """Whether peaks at T, 2T and 4T tokens contain a T² term: their second difference is that term alone."""
    one, two, four = peaks
    square = ((four - two) - 2 * (two - one)) / 6
    return square > SQUARE_BYTES * tokens**2


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that torch allocates while `call` runs."""
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
    # Longer inputs use more threads, each with its own memory: that is not growth of the method.
    torch.set_num_threads(1)
    try:
        with _profile() as profile:
            first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
            call()
            del first
    finally:
        torch.set_num_threads(threads)
    # The allocator's own totals: a busy machine mixes up event times, and a sum over events would be wrong.
    totals = _totals(profile)
    return max(totals.values()) - totals[FIRST_BYTES]


def _totals(profile: Any) -> dict[int, int]:
    """By size of a CPU allocation, the most bytes in use after one of that size."""
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
    """Frees what earlier calls left in cycles, and collects nothing during the call: else the peak would depend on when
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
    """torch's memory profiler, without the messages that it writes past Python as it starts and stops."""
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
    """For the whole process, so only briefly: what other threads print meanwhile is lost."""
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
