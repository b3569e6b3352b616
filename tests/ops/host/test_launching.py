"""Launches as values: strides, descriptors, tile widths."""

import pytest
import torch

from tilewise.ops._host import launching
from tilewise.ops._host.launching import Launch, descriptor, fits_descriptor, padded_channels, row_strides, tile_widths


class Kernel:
    """Stands in for a jitted kernel."""

    def __init__(self):
        self.compiled = object()
        self.launched = []

    def __getitem__(self, grid):
        def start(**arguments):
            self.launched.append((grid, arguments))
            return self.compiled

        return start


def test_a_launch_runs_with_its_grid_and_arguments():
    kernel = Kernel()
    assert Launch(kernel, 3, {"q": 1}).run() is kernel.compiled
    assert kernel.launched == [((3,), {"q": 1})]


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    assert Launch(kernel, 0, {"q": 1}).run() is None
    assert kernel.launched == []


def test_row_strides():
    assert row_strides(torch.empty(2, 3, 4, 5).stride()) == (60, 20, 5)
    assert row_strides(torch.empty(3, 4, 5).stride()) == (0, 20, 5)


@pytest.mark.parametrize(
    ("channels", "padded"), [(1, 16), (16, 16), (17, 32), (40, 64), (128, 128), (129, 256), (256, 256)]
)
def test_padded_channels(channels, padded):
    assert padded_channels(channels) == padded


@pytest.mark.parametrize(
    ("channels", "values", "size", "widths"),
    [
        (64, 64, 2, (64, 64)),
        (40, 24, 2, (64, 64)),  # wrong on Hopper with Triton 3.6 as (64, 32)
        (72, 24, 2, (128, 64)),
        (24, 24, 2, (32, 32)),
        (8, 24, 2, (32, 32)),
        (128, 256, 2, (128, 256)),
        (16, 256, 2, (64, 256)),
        (16, 64, 4, (32, 64)),
    ],
)
def test_a_narrow_tile_is_widened_beside_a_wide_one(channels, values, size, widths):
    assert tile_widths(channels, values, size) == widths
    assert tile_widths(values, channels, size) == widths[::-1]


def test_descriptors_read_what_is_aligned():
    x = torch.empty(2, 30, 3, 64, dtype=torch.bfloat16)
    assert fits_descriptor(x)
    assert fits_descriptor(x.transpose(1, 2))
    assert fits_descriptor(x[:, :, :, 8:40])
    assert not fits_descriptor(x[:, :, :, 1:33]), "starts between two lines of 16 bytes"
    assert not fits_descriptor(torch.empty(2, 30, 3, 36, dtype=torch.bfloat16)), "a row of 72 bytes"
    assert not fits_descriptor(x[:, :0]), "empty"
    assert not fits_descriptor(x[:1].expand(2, -1, -1, -1)), "expanded"
    assert not fits_descriptor(x[0]), "packed: rows past a sequence are another's"


def test_a_descriptor_sees_heads_before_tokens():
    x = torch.empty(2, 30, 3, 64, dtype=torch.bfloat16)
    made = descriptor(x, 16, 32)
    assert list(made.shape) == [2, 3, 30, 64]
    assert list(made.strides) == [30 * 3 * 64, 64, 3 * 64, 1]
    assert list(made.block_shape) == [1, 1, 16, 32]


@pytest.mark.parametrize("lengths", [[5], [0, 0], [64, 1, 0, 63], [200, 3], [1] * 50, []])
def test_slots_hold_every_tile_of_every_sequence(lengths):
    block = 32
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    starts = [int(offset) // block + b for b, offset in enumerate(offsets)]
    assert launching.tile_slots(sum(lengths), block, offsets) == starts[-1]
    for b, length in enumerate(lengths):
        assert starts[b + 1] - starts[b] >= -(-length // block)


def test_dense_tiles_are_counted_exactly():
    assert launching.tile_slots(65, 32, None) == 3
    assert launching.tile_slots(0, 32, None) == 0
    assert launching.batch_size(torch.empty(4, 2, 1, 1), None) == 4
    assert launching.batch_size(torch.empty(4, 1, 1), torch.tensor([0, 1, 4])) == 2
