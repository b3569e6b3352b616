"""What `make test-tritons` asks of other releases of Triton: every kernel compiles, every launch of verify passes the
front end, every operator is right both ways.

Spills are no part of it: `tilewise inspect --check` holds them, with the release of constraints.txt.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from battery import check
from compiling import run_compiling

from tilewise import workbench
from tilewise.inspect.command import operators

# With the Triton of constraints.txt other tests cover all of it: `make test-tritons` runs these with two others.
pytestmark = pytest.mark.nightly

TESTS = Path(__file__).parent
SCRIPT, FRONT_END = TESTS / "compile_every_kernel.py", TESTS / "pass_front_end.py"
MYTORCH = TESTS.parent / "packages" / "mytorch"


# Launched before one of Hopper's own.
FOR_HOPPER = {"flash_prefill_offsets_kernel"}


def kernels(project: Path) -> set[str]:
    """Names of what is launched, as the sources of a distribution have them."""
    sources = (path.read_text() for path in (project / "src").rglob("*.py"))
    names = {name for source in sources for name in re.findall(r"(?m)^def (\w+_kernel)\(", source)}
    assert len(names) > 20
    return names


def compiled(architecture: int, *groups: tuple[str, ...], script: Path = SCRIPT) -> set[str]:
    """Names of the kernels that operators launch, all of them compiled; a process compiles for a group of operators."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda group: run_compiling(script, architecture, *group), groups)
        rows = [row for of_group in found for row in of_group]
    assert [row for row in rows if row[-1]] == []
    return {kernel for kernel, _, _ in rows}


def test_every_kernel_compiles_for_hopper():
    """In every operator that launches it, forward and backward."""
    assert compiled(90, *((operator,) for operator in operators()), ("probe",)) == kernels(TESTS.parent)


@pytest.mark.parametrize("architecture", [80, 100])
def test_the_portable_kernels_compile_for_other_cards(architecture):
    found = compiled(architecture, (*operators(), "probe"))
    assert found == {name for name in kernels(TESTS.parent) if "_hopper_" not in name} - FOR_HOPPER


def test_every_launch_of_verify_passes_the_front_end():
    """What masks, targets, packed sequences or missing strides make of a kernel: it is compiled above for one problem
    only, and what the language takes changes between releases.
    """
    names = workbench.names("suite")
    # Operators of a group share kernels, which pass once.
    nsa = tuple(name for name in names if name.startswith("nsa"))
    silu = tuple(name for name in names if "hstu" in name or "bsa" in name)
    others = tuple(name for name in names if name not in nsa + silu)
    found = compiled(90, nsa, silu, others, script=FRONT_END)
    # A step of sparse decoding is no operator of verify's: it is compiled above, with pages and without.
    decoding = {name for name in kernels(TESTS.parent) if name.startswith("nsa_cached_")}
    assert kernels(TESTS.parent) - found - decoding == {"probe_mixed_widths_kernel"}


def test_every_kernel_of_mytorch_compiles():
    found = run_compiling(MYTORCH / "tests" / "compile_kernels.py", 90, "float32", "each")
    assert {kernel["kernel"] for kernel in found} == kernels(MYTORCH)


@pytest.mark.parametrize("operator", workbench.names("suite"))
def test_every_operator_is_right(operator):
    result = check(operator, "small", "bf16", "triton", "cpu")
    problem = workbench.find(operator).load("suite").find("small").problem
    names = {comparison.name for comparison in result.comparisons}
    assert names & set(problem.outputs), "the forward"
    assert names & {"dq", "dfq"} or not problem.differentiable, "the backward"
