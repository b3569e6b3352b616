"""How a program starts its kernels: addresses, sizes and descriptors filled in, and Triton's launcher called."""

import torch
from fake_kernels import MADE_WITH, MEMORY, PLAIN, needs_one_launcher
from triton import knobs

from tilewise.ops._host import program, start
from tilewise.ops._host.launching import Descriptor, Launch
from tilewise.ops._host.program import emit
from tilewise.ops._host.symbol import Trace
from tilewise.ops._host.template import make

GPU = torch.device("cuda", 0)


class At:
    """A tensor at an address, of which a program asks nothing else."""

    def __init__(self, address):
        self._address = address

    def data_ptr(self):
        return self._address


def launching(kernel, arguments, count=1):
    """Launches with what `arguments` makes of the slots of so many tensors like MEMORY: a function of addresses."""

    def plan(*slots):
        emit(slots[0], Launch(kernel, 3, PLAIN | arguments(*slots)))

    made = program.Program(make(plan, (MEMORY,) * count, GPU))
    return lambda *addresses: made.run([At(address) for address in addresses], ())


@needs_one_launcher
def test_an_unknown_descriptor_is_left_to_triton(kernel, encoded):
    """Such as one that a newer Triton says more of."""
    for unknown in (None, MADE_WITH | {"fp4_padded": True}, MADE_WITH | {"newer": 1}):
        kernel.descriptors = (unknown,)
        kernel.by_triton.clear()
        start._kernels.clear()
        launching(kernel, lambda x: {"x": Descriptor(x, (8, 16), (16, 1), (8, 16))})(1024)
        start.run(Launch(kernel, 3, PLAIN | {"x": Descriptor(MEMORY, (8, 16), (16, 1), (8, 16))}))
        (_, (first, *_)), (_, (second, *_)) = kernel.by_triton
        assert first.base.data_ptr() == 1024
        assert second.base is MEMORY
    assert encoded == []


def test_a_launch_without_a_direct_launcher_goes_through_triton(kernel, monkeypatch):
    monkeypatch.setattr(start, "_direct_launcher", lambda compiled: None)
    launching(kernel, lambda x, y: {"x": x[8:], "strides": (y, 5)}, 2)(1024, 2048)
    assert kernel.by_triton == [((3, 1, 1), (1024 + 32, 5, 48, (2048, 5), 0.5, 64, 4))]
    assert kernel.direct == []


@needs_one_launcher
def test_hooks_are_told_of_launches(kernel):
    """As a profiler adds them: then Triton launches."""
    started = launching(kernel, lambda x: {"x": x})
    given = Launch(kernel, 3, PLAIN)

    def both():
        started(1024)
        start.run(given)
        return len(kernel.direct), len(kernel.by_triton)

    assert both() == (2, 0)
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        before = len(kernel.by_triton)

        def hook(_metadata):
            pass

        hooks.add(hook)
        try:
            assert both() == (2, before + 2)
        finally:
            hooks.remove(hook)
    assert both()[0] == 4


@needs_one_launcher
def test_a_launch_fills_in_addresses(kernel, monkeypatch):
    streams = [77, 77, 78]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: streams.pop(0))
    started = launching(kernel, lambda _, x: {"x": x[4:], "strides": (x, 5)}, 2)
    start.run(Launch(kernel, 3, PLAIN | {"x": MEMORY[4:], "strides": (MEMORY, 5)}))
    address = MEMORY.data_ptr()
    for place in (address, 4096):
        started(0, place)
    by_tensors, first, second = kernel.direct
    assert by_tensors == first
    assert first[:4] == (3, 1, 1, 77)
    assert list(first[-1]) == [address + 16, 5, 48, (address, 5), 0.5, 64, 4]
    assert second[3] == 78
    assert list(second[-1]) == [4096 + 16, 5, 48, (4096, 5), 0.5, 64, 4]


@needs_one_launcher
def test_descriptors_are_kept_while_the_address_is_the_same(kernel, encoded):
    started = launching(kernel, lambda x: {"x": Descriptor(x[16:], (8, 16), (16, 1), (8, 16))})
    for address in (1024, 1024, 2048, 1024):
        started(address)
    assert [call[0] for call in encoded] == [1024 + 64, 2048 + 64]
    assert [list(call[-1])[:5] for call in kernel.direct] == [[f"map {i}", 8, 16, 16, 1] for i in (1, 1, 2, 1)]
    # Whatever the allocator gives, so many at most are kept, and the last is one of them.
    for i in range(2 * start.MOST_ENCODED + 1):
        started(4096 * (i + 1))
    count = len(encoded)
    started(4096 * (2 * start.MOST_ENCODED + 1))
    assert len(encoded) == count
    started(1024)
    assert len(encoded) == count + 1


@needs_one_launcher
def test_sizes_make_a_descriptor_another(kernel, encoded):
    def plan(x):
        emit(
            x,
            Launch(
                kernel,
                x.shape[0],
                PLAIN | {"x": Descriptor(x, (x.shape[0], 16), (x.shape[0] * 2, 1), (8, 16)), "size": x.shape[0]},
            ),
        )

    made = program.Program(make(plan, (MEMORY,), GPU, Trace()))
    for size in (256, 128, 256):
        made.run([At(1024)], made.solve([MEMORY[:size]], []))
    assert [call[5:7] for call in encoded] == [((256, 16), (512, 1)), ((128, 16), (256, 1))]
    assert [(call[0], list(call[-1])[:6]) for call in kernel.direct] == [
        (size, [f"map {i}", size, 16, 2 * size, 1, size]) for size, i in ((256, 1), (128, 2), (256, 1))
    ]


def test_what_triton_specialises_on_is_a_decision(kernel):
    """Of a symbol: a call that needs another kernel has another program."""

    def plan(x, stride, size, scale):
        emit(
            x,
            Launch(
                kernel,
                3,
                PLAIN
                | {
                    "x": x,
                    "size": size,
                    "stride": stride,
                    "strides": (stride, 17),
                    "scale": scale / 4,
                    "SIZE": x.shape[0],
                },
            ),
        )

    made = program.Program(make(plan, (MEMORY, 48, 5, 8), GPU, Trace()))

    def serves(x=MEMORY, stride=48, size=5, scale=8):
        return made.solve([x], [stride, size, scale]) is not None

    assert serves()
    assert serves(stride=16, size=7, scale=3)
    assert serves(size=1)
    assert not any(
        (serves(stride=17), serves(stride=1), serves(stride=2**31), serves(size=2**31), serves(MEMORY[:128]))
    )
