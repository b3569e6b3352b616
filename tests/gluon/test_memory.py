"""Shared memory by region: parts of a buffer, and bytes that are seen in two ways."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_kernels import COLUMNS, ROWS, descriptor, tiles
from gluon_memory_kernels import columns_kernel, descriptor_of, halves_kernel, places_kernel, reinterpreted_kernel
from triton.experimental.gluon import language as gl

from tilewise import interpreter
from tilewise._gluon import compiler
from tilewise._gluon.faults import KernelFaultError
from tilewise._gluon.offsets import written_bases

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
HALF = ROWS // 2
Swizzled, Nvmma = gl.SwizzledSharedLayout, gl.NVMMASharedLayout


def halves(how):
    a, out = tiles(), torch.zeros(ROWS, COLUMNS).half()
    halves_kernel[(1,)](descriptor_of(a, HALF), descriptor(out), descriptor_of(out, HALF), how)
    return a, out


def columns(how):
    a, out = tiles(), torch.zeros(ROWS, COLUMNS).half()
    columns_kernel[(1,)](descriptor(a), descriptor(out), how)
    return a, out


def words(how):
    a, out = tiles(), torch.zeros(HALF * HALF, dtype=torch.int32)
    reinterpreted_kernel[(1,)](descriptor_of(a, HALF), out, how)
    return a, out


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_halves_of_a_buffer_are_independent(seed):
    with interpreter.scheduled(seed):
        a, out = halves("stores to its half")
        assert torch.equal(out, torch.cat([a[:HALF] * 2, a[HALF:]]))
        a, out = halves("overwrites the other half")
        assert torch.equal(out, a)
        a, out = halves("copies the half without a store")
        assert torch.equal(out[HALF:], a[HALF:])
        a, out = columns("left")
        left, right = a[:, :HALF].float(), a[:, HALF:].float()
        assert torch.equal(out, (left @ right.T).half())


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("run", "how", "kind"),
    [
        (halves, "reads the other half", "read too early"),
        (halves, "forgets the fence of its half", "missing fence"),
        (halves, "overwrites its half", "overwritten"),
        (halves, "half is empty", "uninitialised"),
        (columns, "right", "overwritten"),
        (words, "early", "read too early"),
    ],
)
def test_a_half_is_not_forgotten(run, how, kind, seed):
    with interpreter.scheduled(seed), pytest.raises(KernelFaultError) as raised:
        run(how)
    assert raised.value.kind == kind


@pytest.mark.skipif(not compiler.TELLS_OFFSETS, reason="Triton 3.6 does not tell")
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Swizzled(1, 1, 1, [0]), [128]),
        (Swizzled(4, 2, 4, [0, 1]), [64, 32]),
        (Swizzled(8, 2, 64, [1, 0]), [64, 16]),
        (Swizzled(8, 1, 8, [2, 1, 0]), [4, 16, 64]),
        (Nvmma(128, 16, 2), [64, 128]),
        (Nvmma(64, 16, 2), [16, 64]),
        (Nvmma(32, 8, 2), [8, 32]),
        (Nvmma(0, 32, 3), [4, 8, 16]),
        (Nvmma(128, 16, 3), [2, 64, 64]),
        (Nvmma(128, 16, 2, True), [128, 64]),
    ],
)
def test_where_elements_lie_is_what_triton_says(layout, shape):
    """Written out for Triton 3.6."""
    assert written_bases(layout, shape) == [list(basis) for basis in compiler.offset_bases(layout, shape)]


def test_bytes_that_are_reinterpreted():
    a, out = words("first")
    assert torch.equal(out, torch.arange(HALF * HALF, dtype=torch.int32))
    a, out = words("")
    # A row of the swizzled half is 128 bytes, of which 16 at a time change places within the row.
    found = out.view(torch.float16).view(HALF, 8, 8)
    expected = a[:HALF].view(HALF, 8, 8)
    for row in range(HALF):
        for chunk in range(8):
            assert torch.equal(found[row, chunk ^ row % 8], expected[row, chunk])


@pytest.mark.skipif(not hasattr(gl.shared_memory_descriptor, "gather"), reason="Triton 3.6 has no gather")
def test_elements_by_their_places():
    x, out = torch.arange(512, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    places_kernel[(1,)](x, out, "")
    turned = x.view(16, 32).flip(0)
    assert torch.equal(out.view(2, 16, 32), torch.stack([turned, turned.flip(1)]))
    with pytest.raises(KernelFaultError, match="out of bounds: places 1 to 16 of 16 in shared memory"):
        places_kernel[(1,)](x, out, "outside")
