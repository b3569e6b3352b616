"""The choice of tiles is a pure function of problem and architecture."""

import itertools

import pytest

from tilewise.ops.flash.configs import SHARED_MEMORY, TABLE, WIDTHS, Config, Problem, choose, family

KERNELS = ("fwd", "dkdv", "dq")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [(80, "medium"), (86, "small"), (87, "medium"), (89, "small"), (90, "hopper"), (100, "blackwell"), (103, "blackwell"), (120, "small")],
)
def test_family(architecture, expected):
    assert family(architecture) == expected


def test_the_table_is_whole():
    assert set(TABLE) == set(itertools.product(SHARED_MEMORY, (2, 4), KERNELS))
    for (name, _, _), rows in TABLE.items():
        assert len(rows) == len(WIDTHS)
        for candidates in rows:
            assert not candidates[-1].tma, "the last candidate must serve tensors that descriptors cannot read"
            assert name in ("hopper", "blackwell") or not any(config.tma for config in candidates), "descriptors are Hopper's and newer"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120, 150])
def test_every_problem_has_tiles(kernel, size, architecture):
    sizes = (1, 16, 33, 64, 96, 128, 200, 256), (1, 64, 256), (1, 2048, 100_000), (False, True)
    for channels, values, keys, descriptors in itertools.product(*sizes):
        config = choose(kernel, Problem(channels, values, keys, size, descriptors), architecture)
        assert config.tma <= descriptors
        assert choose(kernel, Problem(channels, values, keys, size, descriptors), architecture) == config


def test_the_wider_side_decides():
    assert (
        choose("fwd", Problem(16, 128, 9000, 2, True), 90)
        == choose("fwd", Problem(128, 16, 9000, 2, True), 90)
        == choose("fwd", Problem(128, 128, 9000, 2, True), 90)
    )


def test_hopper_reads_through_descriptors_where_it_can():
    assert choose("fwd", Problem(128, 128, 16384, 2, True), 90) == Config(128, 128, 8, 3, tma=True)
    assert choose("fwd", Problem(128, 128, 16384, 2, False), 90) == Config(128, 64, 8, 3)


def test_short_sequences_take_smaller_tiles_and_tiny_ones_no_descriptors():
    assert choose("fwd", Problem(128, 128, 2048, 2, True), 90) == Config(64, 64, 4, 3, tma=True)
    assert not choose("fwd", Problem(128, 128, 200, 2, True), 90).tma
