"""Which compiled kernel a launch gets, and how it is started: Triton's rules and Triton's launcher, without a GPU."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_kernels import MEMORY, PLAIN, Compiled, Kernel, needs_one_launcher
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.ops._host import start
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launching import Descriptor, Launch
from tilewise.ops._host.template import Template

CPU = torch.device("cpu")


SAME = {
    "another size": {"size": 7},
    "a size of 1": {"size": 1},
    "a size that 16 divides": {"size": 64},
    "another stride that 16 divides": {"stride": 16},
    "strides as divisible": {"strides": (64, 3)},
    "another number": {"scale": 2.0},
    "another aligned address": {"x": MEMORY[4:]},
    "other shapes and strides": {"x": MEMORY.view(2, 128).t()},
    "a default given": {"WIDTH": 4},
}
OTHER = {
    "dtype": {"x": MEMORY.view(torch.int32)},
    "alignment": {"x": MEMORY[1:]},
    "no tensor": {"x": None},
    "a stride that 16 does not divide": {"stride": 17},
    "a stride of 1": {"stride": 1},
    "a stride in 64 bits": {"stride": 2**31},
    "a negative stride in 64 bits": {"stride": -(2**31) - 16},
    "a size in 64 bits": {"size": 2**31},
    "a size that is no whole number": {"size": 5.0},
    "strides otherwise divisible": {"strides": (32, 48)},
    "one stride of 1": {"strides": (32, 1)},
    "fewer strides": {"strides": (32,)},
    "no strides": {"strides": None},
    "a tensor among numbers": {"strides": (MEMORY, 17)},
    "no number": {"scale": None},
    "a constant": {"SIZE": 128},
    "a constant that has a default": {"WIDTH": 8},
    "warps": {"num_warps": 8},
    "registers": {"maxnreg": 128},
}


def found(kernel, device=0, **arguments):
    return start._find(Launch(kernel, 3, PLAIN | arguments), device)[0].compiled


@pytest.mark.parametrize("name", SAME)
def test_what_triton_does_not_look_at_gives_the_same_kernel(kernel, name):
    assert found(kernel, **SAME[name]) is found(kernel)


@pytest.mark.parametrize("name", OTHER)
def test_what_triton_specialises_on_gives_another_kernel(kernel, name):
    assert found(kernel, **OTHER[name]) is not found(kernel)
    assert found(kernel, **OTHER[name]) is found(kernel, **OTHER[name])


def test_tensors_in_a_tuple_count_as_those_outside(kernel):
    whole = found(kernel, strides=(MEMORY, 17))
    assert found(kernel, strides=(MEMORY[4:], 33)) is whole
    for other in (MEMORY[1:], MEMORY.view(torch.int32), None, 0.5):
        assert found(kernel, strides=(other, 17)) is not whole
    assert found(kernel, strides=(None, 17)) is not found(kernel, strides=(0.5, 17))


def test_each_device_and_kernel_has_its_own(kernel):
    assert found(kernel, device=1) is not found(kernel)
    template = Template(CPU)
    assert found(kernel, x=template.given(MEMORY)) is found(kernel), "a slot stands for a tensor"
    assert found(kernel, x=template.given(MEMORY)[1:]) is not found(kernel)


whole = st.sampled_from([-(2**40), -16, -1, 0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, 2**40])
tensor = st.sampled_from([MEMORY, MEMORY[1:], MEMORY[4:], MEMORY.half(), MEMORY.view(torch.int64)])
number = whole | st.none() | st.floats(0.5, 2.0)
arguments = st.fixed_dictionaries(
    {
        "x": st.none() | tensor,
        "size": number,
        "stride": number,
        "strides": st.none() | st.lists(whole, min_size=1, max_size=2).map(tuple) | st.tuples(tensor, whole),
        "scale": number,
        "SIZE": st.sampled_from([16, 32]),
    }
)


@given(arguments, arguments, st.sets(st.sampled_from(sorted(PLAIN.keys() - {"num_warps"})), max_size=2))
@settings(max_examples=300, deadline=None)
def test_one_kernel_is_one_to_triton(one, changes, names):
    """What is one kernel here has one specialisation there."""
    kernel, other = Kernel(), one | {name: changes[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "_kernels", Kept(64))
        patch.setattr(start, "_signatures", {})
        patch.setattr(start, "_compile_expected", lambda *_: None)
        compiled = [start._find(Launch(kernel, 1, x), 0)[0].compiled for x in (one, other)]
    keys = [str(kernel.bind(**x)[1]) for x in (one, other)]
    assert compiled[0] is not compiled[1] or keys[0] == keys[1]


@needs_one_launcher
def test_the_direct_launch_is_triton_s_own(kernel):
    compiled = Compiled(kernel)
    direct = start._direct_launcher(compiled)
    assert direct.listed
    direct.launch(3, 1, 1, 77, *direct.before, [1000, 2])
    compiled.run(3, 1, 1, 77, compiled.function, compiled.packed_metadata, None, None, None, 1000, 2)
    assert_alike(kernel.direct)


def assert_alike(calls):
    (*direct, arguments), (*own, own_arguments) = calls
    assert direct == own
    assert list(arguments) == list(own_arguments)


@needs_one_launcher
def test_a_launch_with_descriptors_is_triton_s_own(kernel, encoded):
    described = Descriptor(MEMORY, (8, 16), (16, 1), (8, 16))
    start.run(Launch(kernel, 3, PLAIN | {"x": described}))
    own = Compiled(kernel, kernel.descriptors)
    theirs = TensorDescriptor(MEMORY, [8, 16], [16, 1], [8, 16])
    own.run(
        3, 1, 1, 77, own.function, own.packed_metadata, None, None, None, theirs, 5, 48, (32, 17), 0.5, 64, 4
    )  # fmt: skip
    assert encoded[0] == encoded[1]
    kernel.direct[1][-1][0] = "map 1"
    assert_alike(kernel.direct)


@needs_one_launcher
def test_a_tile_of_another_shape_gives_another_kernel(kernel, encoded):
    described = Descriptor(Template(CPU).given(MEMORY)[16:], (8, 16), (16, 1), (8, 16))
    assert found(kernel, x=described._replace(block_shape=(4, 16))) is not found(kernel, x=described)
    assert found(kernel, x=described._replace(shape=(6, 16))) is found(kernel, x=described)


@needs_one_launcher
def test_an_unknown_launcher_is_left_to_triton(kernel):
    class Newer(nvidia.CudaLauncher):
        """May do anything."""

    def wrapped_otherwise(*_):
        return kernel

    for change in (
        {"__class__": Newer},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"gsan_enabled": True},
        {"launch": wrapped_otherwise},
    ):
        compiled = Compiled(kernel)
        assert start._direct_launcher(compiled) is not None
        for name, value in change.items():
            setattr(compiled.run, name, value)
        assert start._direct_launcher(compiled) is None, change
    unknown = Compiled(kernel)
    unknown.run = lambda *_: None
    assert start._direct_launcher(unknown) is None


@needs_one_launcher
def test_threads_wait_until_a_kernel_is_loaded(kernel, monkeypatch):
    class Loading(Compiled):
        """As Triton's: its launcher is there before its function."""

        def __init__(self, kernel):
            super().__init__(kernel)
            self.launcher, self.run_, self.function = self.run_, None, None

        @property
        def run(self):
            if self.run_ is None:
                self.run_ = self.launcher
                time.sleep(0.05)
                self.function = 1234
            return self.run_

        @run.setter
        def run(self, launcher):
            self.run_ = launcher

    loading = Loading(kernel)
    monkeypatch.setattr(kernel, "warmup", lambda **_: loading)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: start._find(Launch(kernel, 3, PLAIN), 0).kernel.direct.before[0], range(4)))
    assert found == [1234] * 4


@needs_one_launcher
def test_a_repeated_launch_is_the_launch(kernel):
    repeated = start.Repeated(kernel, 3, {name: PLAIN[name] for name in ("size", "strides", "SIZE", "num_warps")})
    kernels = set()
    for varying in (
        {"x": MEMORY, "stride": 48, "scale": 0.5},
        {"x": MEMORY[4:], "stride": 16, "scale": 2.0},
        {"x": MEMORY[1:], "stride": 16, "scale": 2.0},
        {"scale": None, "x": MEMORY, "stride": 17},
        {"x": None, "stride": 16, "scale": 2.0},
        {"x": MEMORY, "stride": 16, "scale": 2.0, "WIDTH": 4},
    ):
        for _ in range(2):
            repeated.run(varying)
        start.run(repeated.launch(varying))
        first, second, third = kernel.direct[-3:]
        assert first == second == third
        kernels.add(id(found(kernel, **repeated.launch(varying).arguments)))
    assert len(kernels) == 4
    # A constant that varies may be another kernel's.
    assert len(repeated._known) == 4
    calls = len(kernel.direct)
    start.Repeated(kernel, 0, PLAIN).run({})
    assert len(kernel.direct) == calls
