"""Capturing and pretending another architecture are of one context: other threads and tasks compute as ever."""

import asyncio
import threading

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._host import backend, launching
from tilewise.ops.flash import api

pytestmark = pytest.mark.gpu


def leaves(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 20, 2, 16, generator=generator).to(device).requires_grad_() for _ in range(3)]


def attend(x):
    return flash_attention(*x, causal=True, backend="triton")


def step(x):
    o = attend(x)
    return [o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))]


def in_a_thread(function):
    """What a function returns in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def names(launches):
    return [launch.kernel.fn.__name__ for launch in launches]


def test_a_call_beside_a_capture_computes(device):
    """It returned uninitialised memory once."""
    x = leaves(device)
    truth = step(x)
    with launching.capture(80) as launches:
        beside = in_a_thread(lambda: step(x))
        assert launches == []
        attend(x)
        assert names(launches) == ["flash_fwd_kernel"]
        again = in_a_thread(lambda: step(x))
    for made in (beside, again, step(x)):
        assert all(torch.equal(a, b) for a, b in zip(made, truth, strict=True))
    assert len(launches) == 1


def test_captures_in_two_threads_collect_their_own(device):
    x, meet, found = leaves(device), threading.Barrier(2), {}

    def work(name, count):
        with launching.capture(90) as launches:
            meet.wait()
            for _ in range(count):
                attend(x)
            meet.wait()
            found[name] = len(launches)

    threads = [threading.Thread(target=work, args=(name, count)) for name, count in (("one", 1), ("three", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"one": 1, "three": 3}


def test_contexts_nest(device):
    x = leaves(device)
    here = backend.architecture(device)
    with launching.capture(80) as outer:
        with backend.as_if_on(120):
            assert backend.architecture(device) == 120
            with launching.capture(90) as inner:
                assert backend.architecture(device) == 90
                attend(x)
            assert backend.architecture(device) == 120
        assert backend.architecture(device) == 80
        attend(x)
        with pytest.raises(KeyError), backend.as_if_on(100):
            raise KeyError
        assert backend.pretended() == 80
    assert (len(outer), len(inner)) == (1, 1)
    assert backend.architecture(device) == here
    assert not backend.observed()


def test_tasks_have_contexts_of_their_own(device):
    x = leaves(device)

    async def captured(turns):
        with launching.capture(80) as launches:
            for _ in range(turns):
                await asyncio.sleep(0)
                attend(x)
            assert backend.pretended() == 80
        return len(launches)

    async def plain():
        made = []
        for _ in range(3):
            await asyncio.sleep(0)
            assert not backend.observed()
            made.append(attend(x))
        return made

    async def both():
        return await asyncio.gather(captured(2), plain(), captured(3))

    two, made, three = asyncio.run(both())
    assert (two, three) == (2, 3)
    assert all(torch.equal(o, attend(x)) for o in made)


def test_what_was_asked_for_is_carried_to_the_backward(device):
    """On a GPU torch runs a backward in a thread of its own."""
    x = leaves(device)
    assert backend.asked() is None
    with launching.capture(80) as launches:
        o = attend(x)
        assert backend.asked().run(backend.pretended) == 80
    assert names(launches) == ["flash_fwd_kernel"]
    in_a_thread(lambda: o.sum().backward())
    assert names(launches)[1:] == ["flash_bwd_prepare_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel"]
    # Nothing stays behind.
    assert not backend.observed()
    assert attend(x).isfinite().all()


def test_two_backwards_of_one_capture_at_a_time(device):
    """A context runs one function at a time: each backward has a copy."""
    x, meet = leaves(device), threading.Barrier(2)
    with launching.capture(80) as launches:
        losses = [attend(x).sum() for _ in range(2)]

    def work(loss):
        meet.wait()
        return torch.autograd.grad(loss, x)

    threads = [threading.Thread(target=work, args=(loss,)) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launches) == 2 + 2 * 3


def test_a_captured_call_remembers_no_problem(device):
    """Its tiles are another architecture's: a later call must not run them."""
    api.flash_forward.forget()
    api.flash_backward.forget()
    with launching.capture(80):
        step(leaves(device))
    assert api.flash_forward._planned == api.flash_backward._planned == {}
