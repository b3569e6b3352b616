"""The choice of tiles is a pure function of problem and architecture."""

import itertools

import pytest
import torch

from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import (
    ENOUGH_PROGRAMS,
    LEAST_STEPS,
    SHARED_MEMORY,
    TABLE,
    WIDTHS,
    Config,
    Problem,
    choose,
    divide_group,
    family,
)
from tilewise.ops.flash.hopper import configs as hopper_configs

KERNELS = ("fwd", "dkdv", "dq")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (80, "medium"),
        (86, "small"),
        (87, "medium"),
        (89, "small"),
        (90, "hopper"),
        (100, "blackwell"),
        (103, "blackwell"),
        (120, "small"),
    ],
)
def test_family(architecture, expected):
    assert family(architecture) == expected


def test_the_table_is_whole():
    assert set(TABLE) == set(itertools.product(SHARED_MEMORY, (2, 4), KERNELS))
    for (name, _, _), rows in TABLE.items():
        assert len(rows) == len(WIDTHS)
        for candidates in rows:
            assert not candidates[-1].tma, "the last candidate must serve tensors that descriptors cannot read"
            assert name in ("hopper", "blackwell") or not any(config.tma for config in candidates), (
                "descriptors are Hopper's and newer"
            )


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


@pytest.mark.parametrize(
    ("programs", "group", "steps", "chunks"),
    [
        (256, 16, 1024, 8),  # 65,536 tokens, 4 key heads, a compressed key every 16 tokens
        (ENOUGH_PROGRAMS, 16, 1024, 1),
        (ENOUGH_PROGRAMS - 1, 16, 1024, 2),
        (ENOUGH_PROGRAMS // 2, 12, 1024, 2),
        (ENOUGH_PROGRAMS // 5, 12, 1024, 6),
        (1, 16, 1024, 16),
        (1, 7, 1024, 7),
        (1, 1, 1024, 1),
        (0, 4, 1024, 4),
        (1, 16, 1, 1),
        (1, 16, LEAST_STEPS // 2, 8),
        (1, 16, LEAST_STEPS // 8, 2),
        (0, 4, 0, 1),
    ],
)
def test_a_group_is_divided_where_key_tiles_are_few(programs, group, steps, chunks):
    assert divide_group(programs, group, steps) == chunks


def test_chunks_divide_the_group():
    for programs, group, steps in itertools.product((0, 1, 9, 100, 500, 2000), range(1, 33), (0, 1, 8, 100)):
        chunks = divide_group(programs, group, steps)
        assert group % chunks == 0
        assert chunks == 1 or group // chunks * steps >= LEAST_STEPS
        assert chunks == 1 or programs * max(n for n in range(1, chunks) if group % n == 0) < ENOUGH_PROGRAMS, (
            "no more than are needed"
        )


def test_no_cache_grows_with_lengths():
    """Packed training has another length in every step."""
    caches = configs._choose, hopper_configs._choose_forward
    before = [cache.cache_info().currsize for cache in caches]
    for keys in range(1, 20_000):
        choose("fwd", Problem(64, 64, keys, 2, True), 90)
        hopper_configs.choose_forward(64, 64, keys, False, False, True)
    # Tiny, short and long.
    assert all(cache.cache_info().currsize <= size + 3 for cache, size in zip(caches, before, strict=True))


def test_a_limit_that_cuts_nothing_is_dropped():
    """Or a window of 512 would make a kernel of its own for some lengths below it."""
    q, k = torch.empty(1, 5, 1, 16), torch.empty(1, 9, 1, 16)

    def limits(causal, left, right):
        inputs = launch.make_inputs(q, k, k, None, None, causal, left, right, 1.0, 0.0)
        return inputs.left, inputs.right

    assert limits(False, 7, 3) == (7, 3)
    assert limits(False, 8, 4) == (None, None)
    assert limits(False, -1, -1) == (None, None)
    assert limits(True, 2**40, 2**40) == (None, 0)
