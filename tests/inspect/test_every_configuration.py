"""Every portable configuration, compiled for cards that no test machine has."""

import pytest

from tilewise.inspect import command
from tilewise.inspect.facts import Wanted, fits
from tilewise.inspect.pool import Pool

# Kernels that spill in a loop with a configuration that `--check` does not compile: at 256 channels, and over
# compressed windows.
SPILLING = {"bsa_selected_bwd_kernel", "flash_bwd_dkdv_kernel"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", [80, 86, 89, 100, 120])
def test_every_portable_configuration_fits_and_spills_in_no_loop(architecture):
    """Of a kernel that spills in a loop with one configuration, others may too."""
    rows = Pool(Wanted((*command.operators(), "nsa-compressed", "nsa-selected"), mix=False), [architecture]).run()
    allowed = command.read_allowances().spilled_in_loops.values()
    listed = {place.rpartition(": ")[2].partition(" ")[0] for places in allowed for place in places}
    assert [f"{row.place}: {row.error}" for row in rows if row.facts is None] == []
    assert [row.place for row in rows if not fits(row.facts)] == []
    spilling = {row.kernel.partition(" ")[0]: row.place for row in rows if row.facts.spills_in_loops}
    assert {kernel: place for kernel, place in spilling.items() if kernel not in listed | SPILLING} == {}
