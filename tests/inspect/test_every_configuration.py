"""Cards that nobody here has: every portable configuration, compiled for each."""

import pytest

from tilewise.inspect import allowances
from tilewise.inspect.facts import fits
from tilewise.inspect.pool import Pool
from tilewise.inspect.request import Wanted


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", [80, 86, 89, 100, 120])
def test_every_portable_configuration_fits_and_spills_in_no_loop(architecture):
    """Of kernels that `--check` allows to spill in a loop on some card, other configurations may too."""
    rows = Pool(Wanted((*allowances.operators(), "nsa-compressed", "nsa-selected"), mix=False), [architecture]).run()
    allowed = allowances.read_allowances().spilled_in_loops.values()
    kernels = {place.rpartition(": ")[2].partition(" ")[0] for places in allowed for place in places}
    assert [f"{row.place}: {row.error}" for row in rows if row.facts is None] == []
    assert [row.place for row in rows if not fits(row.facts)] == []
    spilling = [row for row in rows if row.facts.spills_in_loops]
    assert [row.place for row in spilling if row.kernel.partition(" ")[0] not in kernels] == []
