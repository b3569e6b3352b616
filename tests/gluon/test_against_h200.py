"""The simulation of Gluon against an H200: instruction by instruction, and the kernels for Hopper on a dozen problems.

What the H200 computes is kept in tests/data: where there is no GPU the simulation is compared with that, where there is
one its own results are, too.
"""

import ast
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import gluon_ampere_kernels
import gluon_instruction_kernels
import gluon_instructions
import gluon_language_kernels
import gluon_newer_kernels

sys.path.insert(0, str(Path(__file__).parent))
from flash_outputs import compared

from tilewise._gluon.reductions import REDUCTIONS
from tilewise._gluon.translate import SIMULATED

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CASES = dict(gluon_instructions.cases())
# What has no result: it says something to the compiler, prepares, or only fails.
SILENT = {
    "_promote_bfloat16_to_float32",
    # In gluon_newer_cases.py, where kernels take them by their names.
    *REDUCTIONS,
    "allocate_mbarrier",
    "assume",
    "device_assert",
    "device_print",
    "fence_init_release_cluster",
    "max_constancy",
    "max_contiguous",
    "multiple_of",
    "static_assert",
    "static_print",
}
# Several names of one thing, of one Triton or another; kernels take them from tilewise's own.
OTHER_NAMES = {
    "async_copy_global_to_shared": "tma_load",
    "async_copy_shared_to_global": "tma_store",
    "async_load": "tma_load",
    "async_store": "tma_store",
    "barrier": "thread_barrier",
    "fdiv": "div_rn",
}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs a Hopper GPU, or none")
def test_instructions_give_what_an_h200_gives(device):
    with np.load(gluon_instructions.H200) as kept:
        # Older releases of Triton lack some.
        assert set(kept.files) >= set(CASES)
        wrong = [name for name, case in CASES.items() if not agrees(name, case.run(device), kept[name])]
    assert not wrong


def agrees(name, result, kept):
    """The same numbers, signs of zeros too, or within the steps that an approximation may be off."""
    found, steps = gluon_instructions.kept(result), CASES[name].steps
    if steps:
        return np.allclose(found, kept, rtol=steps * 2.0**-23, atol=2.0**-126, equal_nan=True)
    floating = found.dtype.kind == "f"
    # torch takes either zero of two.
    if floating and not name.startswith(("maximum", "minimum")):
        signs = [np.signbit(x) | np.isnan(x) for x in (found, kept)]
        if not np.array_equal(*signs):
            return False
    return np.array_equal(found, kept, equal_nan=floating)


def test_every_instruction_has_a_case():
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for kernels in (
            gluon_instruction_kernels,
            gluon_language_kernels,
            gluon_ampere_kernels,
            gluon_newer_kernels,
        )
        for node in ast.walk(ast.parse(inspect.getsource(kernels)))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    known = {name for module, functions in SIMULATED for name in functions if hasattr(module, name)}
    assert not {name for name in known - SILENT if OTHER_NAMES.get(name, name) not in used}


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_flash_gives_what_an_h200_gives():
    """16-bit results within two roundings of the largest; the LSE in fp32, whose exponentials a GPU approximates."""
    for case, found in compared().items():
        for name, one in found.items():
            assert one["roundings"] <= (16 if name == "lse" else 2), (case, name, one)
            assert name == "lse" or one["same"] > 0.9, (case, name, one)
