"""Clusters: what they compute, and the synchronisation between their CTAs that a GPU does not miss."""

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

if not hasattr(mbarrier.MBarrierLayout, "multicta"):
    pytest.skip("clusters are of newer Tritons", allow_module_level=True)

from gluon_cluster_kernels import (
    atomics_kernel,
    descriptor,
    exchange_kernel,
    odd_kernel,
    operands,
    product_kernel,
    ring_kernel,
)
from gluon_tutorials import multicta
from triton.experimental import gluon

from tilewise import interpreter
from tilewise._gluon import spread
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
SEEDS = [None, 0, 1]
RIGHT = {"SYNCED": "fence and relaxed barrier", "BYTES": 2, "BETWEEN": "cluster"}


# What is left to kernels after mbarrier.init, and at their ends.
TRITONS = {"3.7": (True, True), "3.8": (False, True), "newer": (False, False)}


@pytest.fixture(autouse=True)
def triton(request, monkeypatch):
    """The Triton whose kernels these are, by default the one that adds most."""
    name = getattr(request, "param", "newer")
    monkeypatch.setattr(spread, "INITS_LEFT_TO_KERNELS", TRITONS[name][0])
    monkeypatch.setattr(spread, "ENDS_LEFT_TO_KERNELS", TRITONS[name][1])
    return name


in_any_triton = pytest.mark.parametrize("triton", TRITONS, indirect=True)


def fault(function, *arguments, **options):
    with pytest.raises(KernelFaultError) as raised:
        function(*arguments, **options)
    return raised.value


def product(ctas=2, steps=3, **options):
    generator = torch.Generator().manual_seed(0)
    m, n = (128, 64) if ctas == 2 else (128, 128)
    a, b = (
        torch.randn(m, steps * 64, generator=generator).half(),
        torch.randn(steps * 64, n, generator=generator).half(),
    )
    c = torch.full((m, n), torch.nan, dtype=torch.float16)
    product_kernel[(1,)](*operands(a, b, c, ctas), steps, **(RIGHT | options), num_ctas=ctas)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), atol=2e-2, rtol=1e-3)


@in_any_triton
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ctas", [2, 4])
def test_a_product_by_multicast(ctas, seed):
    with interpreter.scheduled(seed):
        product(ctas)


@in_any_triton
def test_inits_are_told_of_by_a_barrier_of_the_cluster_as_well():
    product(SYNCED="barrier")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"BETWEEN": "none"}, {"overwritten", "written twice"}),
        ({"BETWEEN": "threads"}, {"overwritten", "written twice"}),
        ({"BETWEEN": "relaxed"}, {"overwritten", "written twice"}),
        ({"BYTES": 4}, {"deadlock"}),
        ({"BYTES": 1}, {"bytes missing"}),
        ({"BYTES": 0}, {"bytes missing", "written twice"}),
    ],
)
def test_a_multicast_that_is_not_awaited_by_all(options, kinds, seed):
    with interpreter.scheduled(seed):
        assert fault(product, **options).kind in kinds


@in_any_triton
@pytest.mark.parametrize("synced", ["none", "relaxed barrier"])
def test_a_multicast_to_barriers_that_may_not_be_initialised(synced, triton):
    if triton == "3.7":
        found = fault(product, SYNCED=synced)
        assert found.kind == "uninitialised"
        assert "of CTA 0.1 is used by CTA 0.0, which does not know of its mbarrier.init" in str(found)
    else:
        product(SYNCED=synced)


def ring(barriers, steps=5):
    a, c = torch.randn(steps * 64, 64).half(), torch.full((64, 64), torch.nan)
    ring_kernel[(1,)](descriptor(a, [64, 64], [[0, 0]]), c, steps, barriers, num_ctas=2)
    assert torch.equal(c, sum(part.float() for part in a.chunk(steps)))


@in_any_triton
@pytest.mark.parametrize("seed", SEEDS)
def test_a_ring_that_two_ctas_release(seed, triton):
    with interpreter.scheduled(seed):
        if triton == "3.7":
            assert "Triton 3.7 has each CTA arrive at its own" in str(fault(ring, "two"))
        else:
            ring("two")
        assert fault(ring, "own").kind == "overwritten"


def test_a_cluster_barrier_is_for_all_threads():
    assert fault(ring, "inside").kind == "cluster barrier"


def exchanged(how):
    x, y = torch.arange(256, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    exchange_kernel[(1,)](x, y, how, num_ctas=2)
    return x, y


@pytest.mark.parametrize("seed", SEEDS)
def test_ctas_exchange_what_they_have(seed):
    with interpreter.scheduled(seed):
        for how in ("conversion", "shared", "sum", "global"):
            x, y = exchanged(how)
            expected = x + x.sum() if how == "sum" else x.roll(128)
            assert torch.equal(y[256:] if how == "global" else y[:256], expected), how


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("global, no barrier", "race"),
        ("shared, own threads meet", "read too early"),
        ("shared, changed early", "overwritten"),
    ],
)
def test_ctas_that_exchange_in_no_order(how, kind, seed):
    with interpreter.scheduled(seed):
        assert fault(exchanged, how).kind == kind


@in_any_triton
def test_a_cta_ends_while_another_reads_its_shared_memory(triton):
    if triton == "newer":
        exchanged("shared, ends early")
    else:
        found = fault(exchanged, "shared, ends early")
        assert str(found).startswith("not waited for: CTA 0.0 ends while another CTA of the cluster may still use its")


def test_what_all_ctas_have_one_of_them_stores():
    x, y = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    atomics_kernel[(1,)](x, y, num_ctas=2)
    assert x.tolist() == [256, 1]
    assert y.item() == 2


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("layout", "refused: Layout has 1 CTAs per CGA, but the context requires 2"),
        ("remote store", "not simulated: a store to another CTA's shared memory"),
        ("arrives twice", "cluster barrier: cluster.arrive, and no cluster.wait since the last"),
        ("waits alone", "cluster barrier: cluster.wait without a cluster.arrive before"),
        ("slice", "not simulated: a slice along an axis that CTAs of a cluster share"),
        ("memory", "too much shared memory: 262144 bytes are allocated"),
    ],
)
def test_what_a_cluster_may_not_do(how, says):
    found = fault(lambda: odd_kernel[(1,)](torch.zeros(256, dtype=torch.int32), how, num_ctas=2))
    assert str(found).startswith(says)
    assert found.lines[-1][0].function == "odd_kernel"


def test_a_cluster_has_a_power_of_two_of_ctas():
    found = fault(lambda: odd_kernel[(1,)](torch.zeros(256, dtype=torch.int32), "", num_ctas=3))
    assert "num_ctas is 3: expected one of 1, 2, 4, 8, 16" in str(found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("columns", [64, 2**15, 2**17])
def test_triton_s_softmax_of_rows_that_ctas_share(columns, seed):
    x = torch.randn(2, columns)
    with interpreter.scheduled(seed):
        torch.testing.assert_close(multicta.multicta_softmax_f32(x), torch.softmax(x, 1))


multicast_copy_kernel = multicta.tma_multicast_copy_kernel


@gluon.jit
def awaited_copy_kernel(in_desc, out_desc):
    multicast_copy_kernel(in_desc, out_desc)
    tma.store_wait(0)


@in_any_triton
def test_triton_s_copy_by_multicast(triton, monkeypatch):
    """It leaves it to the compiler that CTAs know of barriers, and starts a copy that it does not wait for."""
    for name, before in (("async_load", "async_copy_global_to_shared"), ("async_store", "async_copy_shared_to_global")):
        monkeypatch.setattr(tma, name, getattr(tma, name, None) or getattr(tma, before), raising=False)
    x = torch.randn(128, 128).half()
    y = torch.full_like(x, torch.nan)
    found = fault(multicta.run_tma_multicast_copy, x, y)
    assert found.kind == ("uninitialised" if triton == "3.7" else "not waited for")
    if triton != "3.7":
        monkeypatch.setattr(multicta, "tma_multicast_copy_kernel", awaited_copy_kernel)
        multicta.run_tma_multicast_copy(x, y)
        assert torch.equal(x, y)
