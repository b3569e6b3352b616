"""Triton's own tutorials of Gluon, for Ampere and Hopper, on CPU tensors: right, under any schedule."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import tma as hopper_tma

if not hasattr(hopper_tma, "async_copy_global_to_shared"):
    pytest.skip("these tutorials use names that this Triton no longer has", allow_module_level=True)

from gluon_tutorials import async_copy, intro, layouts, message, persistence, tma, warp_specialization, wgmma

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
SEEDS = pytest.mark.parametrize("seed", [None, pytest.param(0, marks=pytest.mark.slow)])
SCHEDULERS = [
    pytest.param(one, id=one.__name__, marks=[pytest.mark.slow] * (i > 0))
    for i, one in enumerate(persistence.schedulers)
]


@pytest.fixture(autouse=True)
def as_if_on_hopper(monkeypatch):
    """Launchers ask for the architecture, and how many SMs there are."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    have_sms(monkeypatch, 2)
    torch.manual_seed(0)


def have_sms(monkeypatch, count):
    properties = SimpleNamespace(multi_processor_count=count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)


def check_sum(add, shape, *arguments, **options):
    a, b, c = torch.randn(shape), torch.randn(shape), torch.full(shape, torch.nan)
    add(a, b, c, *arguments, **options)
    assert torch.equal(a + b, c)


def check_product(multiply, sizes, *arguments, transposed=False):
    m, n, k = sizes
    a, b = torch.randn(m, k).half(), torch.randn(n, k).half()
    c = torch.full((m, n), torch.nan, dtype=torch.float16)
    multiply(a, b if transposed else b.T.contiguous(), c, *arguments)
    torch.testing.assert_close(a @ b.T, c, rtol=1e-3, atol=0.1)


def test_scalars():
    x, y = torch.tensor([42.0]), torch.empty(1)
    intro.copy_scalar(x, y)
    assert torch.equal(x, y)


@pytest.mark.parametrize("copy", [lambda x, y: intro.memcpy(x, y, 64), intro.memcpy_autotune])
def test_elements_one_by_one(copy):
    x, y = torch.randn(100), torch.empty(100)
    copy(x, y)
    assert torch.equal(x, y)


def test_a_launch_has_no_compiled_kernel():
    x, y = torch.randn(8), torch.empty(8)
    launched = layouts.memcpy_1d_impl(x, y, 8, gl.BlockedLayout([1], [32], [4], [0]), num_warps=4)
    with pytest.raises(KernelFaultError, match="not simulated: asm of a launch"):
        launched.asm["sass"]


def test_layouts():
    x, y = torch.randn(200), torch.empty(200)
    layouts.memcpy_1d_impl(x, y, 128, gl.BlockedLayout([1], [32], [4], [0]), num_warps=4)
    assert torch.equal(x, y)


@pytest.mark.parametrize("transposed", [False, True])
def test_layouts_of_two_axes(transposed):
    x, y = torch.randn(100, 200), torch.empty(100, 200)
    x, y = (x.T, y.T) if transposed else (x, y)
    layouts.memcpy_2d_impl(x, y, 128, 256, gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]), num_warps=4)
    assert torch.equal(x, y)


@pytest.mark.parametrize(("source", "target"), [(True, False), (False, True)])
def test_layouts_differ_between_load_and_store(source, target):
    x = torch.randn(200, 150).T if source else torch.randn(150, 200)
    y = torch.empty(200, 150).T if target else torch.empty(150, 200)
    layouts.memcpy_2d_inout(x, y)
    assert torch.equal(x, y)


def test_asynchronous_copy():
    x, y = torch.randn(200), torch.empty(200)
    async_copy.memcpy_1d_cpasync(x, y, 128)
    assert torch.equal(x, y)


def test_sums():
    check_sum(async_copy.elementwise_add, (70, 150))


def test_sums_by_asynchronous_copies():
    layout = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    check_sum(async_copy.elementwise_add_cpasync, (70, 150), layout, 32, 32)


@SEEDS
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("add", [async_copy.elementwise_add_pipelined, tma.elementwise_add_tma])
@pytest.mark.parametrize("shape", [(50, 300), (70, 120)])
def test_pipelined_sums(add, shape, buffers, seed):
    if shape == (70, 120) and buffers == 3:
        shape = (70, 124)
    with interpreter.scheduled(seed):
        check_sum(add, shape, num_buffers=buffers)


def test_tma():
    x, y = torch.randn(500), torch.empty(500)
    tma.memcpy_1d_tma(x, y, 64)
    assert torch.equal(x, y)


@SEEDS
def test_a_message_from_cta_to_cta(seed, monkeypatch):
    """Both copy by TMA; an atomic tells that it has arrived."""
    for name, before in (("async_load", "async_copy_global_to_shared"), ("async_store", "async_copy_shared_to_global")):
        monkeypatch.setattr(hopper_tma, name, getattr(hopper_tma, name, None) or getattr(hopper_tma, before), False)
    with interpreter.scheduled(seed):
        assert torch.equal(message.tma_message_passing(16), torch.arange(16, dtype=torch.int32) + 1000)


@pytest.mark.parametrize("in_registers", [False, True])
def test_one_product(in_registers):
    a, b, c = torch.randn(64, 32).half(), torch.randn(32, 32).half(), torch.randn(64, 32)
    d = torch.empty_like(c)
    wgmma.small_mma(a, b, c, d, 16, in_registers)
    torch.testing.assert_close(a.float() @ b.float() + c, d)


@pytest.mark.parametrize("transposed", [False, True])
def test_products(transposed):
    check_product(wgmma.blocked_matmul, (208, 416, 304), 64, 64, 64, transposed, 4, transposed=transposed)


def test_pipelined_products():
    check_product(wgmma.blocked_matmul_pipelined, (208, 416, 304), 64, 64, 64, 4)


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_pipelined_products_by_aggregates(buffers):
    check_product(persistence.matmul_pipelined, (208, 416, 304), 64, 64, 64, buffers, 4)


@SEEDS
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_persistent_products(scheduler, seed):
    with interpreter.scheduled(seed):
        check_product(persistence.persistent_matmul, (208, 416, 304), 64, 64, 64, 3, 4, scheduler)


@SEEDS
@pytest.mark.parametrize("buffers", [3, 4])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_persistent_products_that_overlap(scheduler, buffers, seed, monkeypatch):
    """The last load, for a tile after the last, has no predicate and is never waited for. All else is right."""

    def multiply(*arguments):
        with pytest.raises(KernelFaultError, match="nothing has waited for a copy") as raised:
            persistence.persistent_matmul_pipelined(*arguments)
        assert raised.value.lines[0][0].function == "issue_loads_stealb"

    # One CTA computes all tiles before that is found.
    have_sms(monkeypatch, 1)
    with interpreter.scheduled(seed):
        check_product(multiply, (208, 416, 304), 64, 64, 64, buffers, 4, scheduler)


@SEEDS
@pytest.mark.parametrize("buffers", [1, 2])
def test_specialised_warps(buffers, seed):
    with interpreter.scheduled(seed):
        check_sum(
            warp_specialization.elementwise_add_warp_specialized,
            (70, 300),
            num_load_buffers=buffers,
            num_store_buffers=buffers,
        )


if hasattr(hopper_tma, "async_load_im2col"):
    from gluon_tutorials import im2col

    @pytest.mark.parametrize("name", ["simple", "padded", "offset", "multi_batch", "multi_batch_padded"])
    def test_places_of_a_window(name):
        """What is expected of them is in the tutorial."""
        getattr(im2col, f"run_tma_im2col_{name}")()

    @pytest.mark.parametrize(
        ("coord", "offsets", "says"),
        [
            ([0, 0, 0, 0], [0, -1], r"offsets \[0, -1\]: expected 2 from 0 to 255"),
            ([0, -2, 0, 0], [0, 0], r"from \[-2, 0\] on: expected a place from \[-1, -1\] to \[2, 2\]"),
        ],
    )
    def test_places_that_no_window_has(coord, offsets, says):
        with pytest.raises(KernelFaultError, match=f"coordinates: a copy in im2col mode .*{says}"):
            im2col.run_tma_im2col("", [-1, -1], [-1, -1], coord, offsets)

    @gluon.jit
    def awaited_mma(a, b, acc, is_async, use_acc):
        return hopper.warpgroup_mma(a, b, acc, use_acc=use_acc)

    @pytest.mark.parametrize(("images", "channels", "size", "stride", "padding"), [(2, 96, 3, 1, 1), (3, 64, 2, 2, 0)])
    def test_convolutions(images, channels, size, stride, padding, monkeypatch):
        """The next copy starts before the product that reads its buffer has been waited for. All else is right."""
        x, w = torch.randn(images, 9, 8, channels).half(), torch.randn(40, size, size, channels).half()
        with pytest.raises(KernelFaultError, match="overwritten: buffer 0 of im2col.py"):
            im2col.conv2d_tma_im2col(x, w, stride=stride, padding=padding)
        monkeypatch.setattr(persistence, "warpgroup_mma", awaited_mma)
        found = im2col.conv2d_tma_im2col(x, w, stride=stride, padding=padding)
        expected = torch.nn.functional.conv2d(
            x.permute(0, 3, 1, 2).float(), w.permute(0, 3, 1, 2).float(), stride=stride, padding=padding
        )
        torch.testing.assert_close(found.permute(0, 3, 1, 2).float(), expected, rtol=1e-3, atol=0.05)
