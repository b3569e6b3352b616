"""Which problems Hopper's kernels take, their tiles, and the order of items: pure functions."""

import itertools

import pytest

from tilewise.ops.flash.configs import SHARED_MEMORY, Problem
from tilewise.ops.flash.hopper.configs import (
    BACKWARD,
    CACHED_BYTES,
    FORWARD,
    FORWARD_CAPPED,
    FORWARD_SHORT,
    REGISTERS,
    SHORT_KEYS,
    WIDTHS,
    choose_backward,
    choose_forward,
    heads_together,
    padded,
    piece,
    shared_bytes,
    why_not,
)

USUAL = Problem(128, 128, 2048, 2, True)
# Barriers and the mailbox, next to the tiles.
BESIDE = 2048


@pytest.mark.parametrize(
    ("direction", "changes", "expected"),
    [
        ("forward", {}, True),
        ("backward", {}, True),
        ("forward", {"channels": 256}, True),
        ("backward", {"channels": 256}, True),
        ("backward", {"value_channels": 136}, True),
        ("backward", {"channels": 64, "value_channels": 136}, False),
        ("backward", {"channels": 136, "value_channels": 40}, True),
        ("forward", {"channels": 40, "value_channels": 8}, True),
        ("forward", {"channels": 32, "value_channels": 32}, False),
        ("forward", {"channels": 32, "value_channels": 40}, True),
        ("forward", {"channels": 44}, False),
        ("forward", {"value_channels": 100}, False),
        ("forward", {"keys": 256}, False),
        ("forward", {"keys": 257}, True),
    ],
    ids=str,
)
def test_which_channels_and_keys_they_take(direction, changes, expected):
    assert (why_not(direction, USUAL._replace(**changes), False) is None) is expected


def test_softcap_leaves_the_backward_of_wide_problems_to_the_portable_kernels():
    wide = USUAL._replace(channels=192)
    assert why_not("backward", wide, True) == "backward of D 192 under softcap"
    assert why_not("forward", wide, True) is why_not("backward", USUAL, True) is None


def test_the_table_is_whole_and_fits():
    assert set(FORWARD) == set(itertools.product(WIDTHS, WIDTHS))
    for table in (FORWARD, FORWARD_CAPPED, FORWARD_SHORT):
        for widths, config in table.items():
            assert shared_bytes(config, *widths) + BESIDE <= SHARED_MEMORY["hopper"]
            assert config.stages >= 2, "a tile is fetched while another is in use"
            assert not config.o_in_q or widths[0] == widths[1], "O has Q's place and must have its width"
            assert config.groups in REGISTERS
    # Of fewer than 128 channels, two warpgroups that share the keys have no columns of dQ each.
    assert set(BACKWARD) == set(FORWARD) - {(64, 192), (64, 256)}
    assert choose_backward(160, 136) == choose_backward(192, 192)


@pytest.mark.parametrize("groups", REGISTERS)
def test_a_block_has_registers_enough(groups):
    registers = REGISTERS[groups]
    assert groups * registers.compute + registers.fetch <= 512
    assert (groups + 1) * 128 * registers.start <= 65536
    assert all(count % 8 == 0 for count in registers)


@pytest.mark.parametrize(
    ("channels", "width"), [(8, 64), (64, 64), (65, 128), (128, 128), (136, 192), (192, 192), (200, 256)]
)
def test_padded(channels, width):
    assert padded(channels) == width
    assert piece(width) == (64 if width == 192 else width)
    assert choose_forward(channels, channels, 4096, False, False, True) == FORWARD[width, width]
    assert choose_forward(channels, channels, 4096, False, True, True) == FORWARD[width, width]._replace(groups=2)


def test_few_keys_take_small_tiles_at_the_diagonal():
    small, usual = FORWARD_SHORT[64, 64], FORWARD[64, 64]
    assert choose_forward(64, 48, SHORT_KEYS, False, False, True) == small
    assert choose_forward(64, 64, SHORT_KEYS + 1, False, False, True) == usual
    assert choose_forward(64, 64, SHORT_KEYS, False, False, False) == usual
    assert choose_forward(64, 64, SHORT_KEYS, False, True, True) == usual._replace(groups=2)
    assert choose_forward(64, 64, SHORT_KEYS, True, False, True) == FORWARD_CAPPED[64, 64]
    assert choose_forward(128, 128, SHORT_KEYS, False, False, True) == FORWARD[128, 128]


@pytest.mark.parametrize(
    ("heads", "group", "size", "limited", "expected"),
    [
        (128, 1, 1 << 20, True, 32),
        (16, 1, 8 << 20, True, 4),
        (64, 8, 8 << 20, True, 32),
        (16, 1, 1 << 20, True, 16),
        (16, 4, 1 << 30, True, 4),
        (16, 1, 1 << 20, False, 1),
        (1, 1, 1, True, 1),
    ],
)
def test_heads_together(heads, group, size, limited, expected):
    assert CACHED_BYTES == 32 << 20
    assert heads_together(heads, group, size, limited) == expected
