"""What verify changes in torch while it runs is this thread's alone, or is touched only where it must be."""

import os
import threading

import pytest
import torch

from tilewise.verify.implementation import pinned
from tilewise.verify.watch import Watch, peak_memory

NAMES = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "full_like")


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_are_not_watched():
    torch.utils.deterministic.fill_uninitialized_memory = False
    with Watch(7.0) as watch:
        mine = torch.empty(40)
        theirs = in_thread(lambda: torch.zeros(40))
        fresh = in_thread(lambda: torch.empty(40).untyped_storage().nbytes())
    assert torch.equal(mine, torch.full_like(mine, 7.0))
    assert theirs.untyped_storage().nbytes() == fresh == 160
    assert len(watch._allocations) == 1


def test_watches_of_two_threads_may_overlap():
    """The first to come is the first to leave."""
    before = [getattr(torch, name) for name in NAMES]
    entered, go_on = threading.Event(), threading.Event()
    found = []

    def other():
        with Watch(3.0) as watch:
            entered.set()
            assert go_on.wait(60)
            found.append(torch.empty(4))
        found.append(watch.overrun())

    with Watch(7.0):
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        mine = torch.empty(4)
    assert torch.equal(mine, torch.full_like(mine, 7.0))
    go_on.set()
    thread.join()
    assert torch.equal(found[0], torch.full((4,), 3.0))
    assert found[1] == ""
    assert [getattr(torch, name) for name in NAMES] == before
    assert "new_empty" not in vars(torch.Tensor)


def test_a_watch_inside_another_ends_with_its_block():
    with Watch(7.0):
        with Watch(3.0):
            inner = torch.empty(4)
        outer = torch.empty(4)
    assert (inner[0].item(), outer[0].item()) == (3.0, 7.0)


class Deeper(torch.autograd.Function):
    """A backward that runs another, until torch takes a further thread for it; the last leaves its result unwritten."""

    @staticmethod
    def forward(ctx, x, depth, threads):
        ctx.depth, ctx.threads = depth, threads
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.threads.add(threading.get_ident())
        if ctx.depth == 0:
            return torch.empty_like(gradient), None, None
        with torch.enable_grad():
            x = torch.ones_like(gradient, requires_grad=True)
            y = Deeper.apply(x, ctx.depth - 1, ctx.threads)
        return torch.autograd.grad(y, [x], gradient)[0], None, None


@pytest.mark.gpu
def test_a_backward_is_watched_in_the_thread_that_torch_runs_it_in(device):
    """A GPU's runs in a thread of its own, on the CPU one inside many others does."""
    x, threads = torch.ones(40, device=device, requires_grad=True), set()
    torch.utils.deterministic.fill_uninitialized_memory = False
    with Watch(7.0):
        y = Deeper.apply(x, 100, threads)
        (gradient,) = torch.autograd.grad(y, [x], torch.ones_like(y))
    assert threads - {threading.get_ident()}
    assert torch.equal(gradient, torch.full_like(gradient, 7.0))


def test_settings_for_all_threads_are_left_alone_where_they_are_right(monkeypatch):
    for name in ("set_default_dtype", "set_float32_matmul_precision"):
        monkeypatch.setattr(torch, name, lambda *_: pytest.fail("another thread may compute just now"))
    with pinned():
        assert torch.get_default_dtype() == torch.float32


def test_settings_come_back_when_the_last_of_several_threads_leaves():
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("medium")
    try:
        entered, go_on, seen = threading.Event(), threading.Event(), []

        def other():
            with pinned():
                entered.set()
                assert go_on.wait(60)
                seen.append((torch.get_default_dtype(), torch.get_float32_matmul_precision()))

        with pinned():
            thread = threading.Thread(target=other)
            thread.start()
            assert entered.wait(60)
        go_on.set()
        thread.join()
        assert seen == [(torch.float32, "highest")]
        assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (torch.float64, "medium")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


def test_what_is_printed_while_memory_is_measured_is_not_lost(capfd):
    peak_memory(lambda: os.write(1, b"from a call"), torch.device("cpu"))
    captured = capfd.readouterr()
    assert captured.out == "from a call"
    assert captured.err == ""
