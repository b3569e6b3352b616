"""Which compiled kernel a launch gets, and how it is started: Triton's rules and Triton's launcher, without a GPU."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.ops._host import start
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launch import Descriptor, Launch
from tilewise.ops._host.template import Template

CPU = torch.device("cpu")


def rows(x, size, stride, strides, scale, SIZE: tl.constexpr, WIDTH: tl.constexpr = 4):
    pass


class Kernel:
    """A kernel as Triton sees it before it is compiled; what launches it is written down."""

    def __init__(self):
        jitted = JITFunction(rows, do_not_specialize=["size"])
        self.fn, self.params = jitted.fn, jitted.params
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(jitted.signature, jitted.params, backend)
        self.direct, self.by_triton = [], []
        self.descriptors = None

    def warmup(self, grid, **_arguments):
        return Compiled(self, self.descriptors)


class Driver:
    """The driver's launcher is no Python function."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *arguments):
        self.calls.append(arguments)


class Compiled:
    """What Triton makes of a kernel, with its own launcher around a driver that only writes down."""

    def __init__(self, kernel, descriptors=None):
        self.function, self.packed_metadata = 1234, (4, 1)
        self.metadata = SimpleNamespace(tensordesc_meta=descriptors)
        self.kernel = kernel
        self.run = launcher = object.__new__(nvidia.CudaLauncher)
        # Where there are descriptors, x is one.
        signature = {"x": "tensordesc<fp32[8, 16]>"} if descriptors else {}
        launcher.launch = nvidia.wrap_handle_tensordesc(Driver(kernel.direct), signature, descriptors)
        launcher.num_ctas = 1
        launcher.arg_annotations, launcher.kernel_signature = ("annotations",), b"signature"
        launcher.global_scratch_size = launcher.profile_scratch_size = 0
        launcher.global_scratch_align = launcher.profile_scratch_align = 1
        launcher.launch_cooperative_grid, launcher.launch_pdl = False, True

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.by_triton.append((grid, arguments))


needs_one_launcher = pytest.mark.skipif(
    "arg_annotations" not in nvidia.CudaLauncher.__init__.__code__.co_names,
    reason="Triton 3.6 makes a launcher for each signature",
)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(start, "_kernels", Kept(64))
    monkeypatch.setattr(start, "_signatures", {})
    # Compiling side by side is not the matter here.
    monkeypatch.setattr(start, "_compile_expected", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    return Kernel()


MEMORY = torch.empty(256, dtype=torch.float32)
PLAIN = {"x": MEMORY, "size": 5, "stride": 48, "strides": (32, 17), "scale": 0.5, "SIZE": 64, "num_warps": 4}
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
    start._direct_launcher(compiled)(3, 77, [1000, 2])
    compiled.run(3, 1, 1, 77, compiled.function, compiled.packed_metadata, None, None, None, 1000, 2)
    assert_alike(kernel.direct)


def assert_alike(calls):
    (*direct, arguments), (*own, own_arguments) = calls
    assert direct == own
    assert list(arguments) == list(own_arguments)


MADE_WITH = {"swizzle": 3, "elem_size": 4, "elem_type": 8, "block_size": [8, 16], "fp4_padded": False}


@pytest.fixture
def encoded(kernel, monkeypatch):
    """What the driver was asked to encode, for a kernel whose x is a descriptor."""
    calls = []

    def encode(address, swizzle, size, kind, block, shape, strides, padding):
        calls.append((address, swizzle, size, kind, tuple(block), tuple(shape), tuple(strides), padding))
        return f"map {len(calls)}"

    utils = SimpleNamespace(fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    # Under the interpreter Triton's own refuses a tensor on the CPU.
    monkeypatch.setattr(Descriptor, "triton", lambda self: self)
    kernel.descriptors = (MADE_WITH,)
    return calls


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
def test_an_unknown_descriptor_is_left_to_triton(kernel, encoded):
    """Such as one that a newer Triton says more of."""
    for unknown in (None, MADE_WITH | {"fp4_padded": True}, MADE_WITH | {"newer": 1}):
        kernel.descriptors = (unknown,)
        kernel.by_triton.clear()
        start._kernels.clear()
        template = Template(CPU)
        described = Descriptor(template.given(MEMORY), (8, 16), (16, 1), (8, 16))
        start.find(Launch(kernel, 3, PLAIN | {"x": described}))([MEMORY], [1024], 77)
        start.run(Launch(kernel, 3, PLAIN | {"x": described._replace(base=MEMORY)}))
        (_, (first, *_)), (_, (second, *_)) = kernel.by_triton
        assert first.base.data_ptr() == 1024
        assert second.base is MEMORY
    assert encoded == []


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


def test_a_launch_without_a_direct_launcher_goes_through_triton(kernel, monkeypatch):
    monkeypatch.setattr(start, "_direct_launcher", lambda compiled: None)
    template = Template(CPU)
    launch = Launch(kernel, 3, PLAIN | {"x": template.given(MEMORY)[8:], "strides": (template.given(MEMORY), 5)})
    start.find(launch)([MEMORY] * 2, [1024, 2048], 77)
    assert kernel.by_triton == [((3, 1, 1), (1024 + 32, 5, 48, (2048, 5), 0.5, 64, 4))]
    assert kernel.direct == []


@needs_one_launcher
def test_hooks_are_told_of_launches(kernel):
    """As a profiler adds them: then Triton launches."""
    template = Template(CPU)
    started = start.find(Launch(kernel, 3, PLAIN | {"x": template.given(MEMORY)}))
    given = Launch(kernel, 3, PLAIN)

    def both():
        started([MEMORY], [1024], 77)
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
def test_a_launch_fills_in_addresses(kernel):
    template = Template(CPU)
    template.given(MEMORY)
    x = template.given(MEMORY)
    started = start.find(Launch(kernel, 3, PLAIN | {"x": x[4:], "strides": (x, 5)}))
    start.run(Launch(kernel, 3, PLAIN | {"x": MEMORY[4:], "strides": (MEMORY, 5)}))
    address = MEMORY.data_ptr()
    for stream, place in ((77, address), (78, 4096)):
        started([None, None], [0, place], stream)
    by_tensors, first, second = kernel.direct
    assert by_tensors == first
    assert first[:4] == (3, 1, 1, 77)
    assert list(first[-1]) == [address + 16, 5, 48, (address, 5), 0.5, 64, 4]
    assert second[3] == 78
    assert list(second[-1]) == [4096 + 16, 5, 48, (4096, 5), 0.5, 64, 4]


@needs_one_launcher
def test_descriptors_are_kept_while_the_address_is_the_same(kernel, encoded):
    template = Template(CPU)
    described = Descriptor(template.given(MEMORY)[16:], (8, 16), (16, 1), (8, 16))
    started = start.find(Launch(kernel, 3, PLAIN | {"x": described}))
    for address in (1024, 1024, 2048, 1024):
        started([None], [address], 77)
    assert [call[0] for call in encoded] == [1024 + 64, 2048 + 64]
    assert [list(call[-1])[:5] for call in kernel.direct] == [[f"map {i}", 8, 16, 16, 1] for i in (1, 1, 2, 1)]
    # Whatever the allocator gives, so many at most are kept, and the last is one of them.
    for i in range(2 * start.MOST_ENCODED + 1):
        started([None], [4096 * (i + 1)], 77)
    count = len(encoded)
    started([None], [4096 * (2 * start.MOST_ENCODED + 1)], 77)
    assert len(encoded) == count
    started([None], [1024], 77)
    assert len(encoded) == count + 1
    assert found(kernel, x=described._replace(block_shape=(4, 16))) is not found(kernel, x=described)
