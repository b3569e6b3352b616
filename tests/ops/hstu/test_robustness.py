"""What the kernels do with values that nobody checked, with tiles of unequal widths, and in what order they
take tiles.
"""

import itertools

import pytest
import torch

from tilewise.ops._host.program import run_all
from tilewise.ops.hstu import configs, launch, reference

# What takes long to interpret is left to the slow set, and to a GPU.
LONG = [] if torch.cuda.is_available() else [pytest.mark.slow]


def offsets_of(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", ["plain", "history"])
def test_bad_values_never_lead_out_of_bounds(masked, device):
    """Offsets that decrease, targets that cannot be.

    Memory around q holds huge numbers, so that a read out of bounds shows.
    """
    around = torch.full((768, 2, 16), 1e15, device=device)
    around[256:512] = torch.randn(256, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    q = around[256:512]
    targets = torch.tensor([-5, 10**6, 300], device=device) if masked == "history" else None
    bad = torch.tensor([0, 256, 0, 256], dtype=torch.int32, device=device)
    inputs = launch.make_inputs(
        q, q, q, bad, targets, 256, 0.25, True, 20 if masked == "history" else 0, 3 if masked == "history" else 0
    )
    for x in (launch.forward(inputs), *launch.backward(inputs, q)):
        assert not (x.isfinite() & (x.abs() > 1e6)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("block_m", [32, pytest.param(64, marks=LONG)])
def test_tiles_of_32_channels_beside_64(block_m, history, tma, device):
    """Triton 3.6 on Hopper gets some products of tiles of unequal widths wrong: not these."""
    lengths = (70, 0, 131)
    offsets = offsets_of(lengths, device)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(sum(lengths), 2, n, generator=generator).to(device, torch.bfloat16) for n in (32, 32, 64, 64)
    )
    assert launch.widths(32, 64, 2) == (32, 64)
    targets, reach, context = (torch.tensor([3, 0, 9], device=device), 50, 4) if history else (None, 0, 0)
    inputs = launch.make_inputs(q, k, v, offsets, targets, 131, 0.2, True, reach, context)
    forward, backward = configs.Config(64, 64, 4, 3, tma, 128), configs.Config(block_m, 64, 4, 3, tma, 128)
    actual = launch.forward(inputs, forward), *launch.backward(inputs, do, backward, forward)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    o = reference.hstu_attention(
        *leaves,
        offsets,
        max_seq_len=131,
        alpha=0.2,
        num_targets=targets,
        max_attn_len=reach,
        contextual_seq_len=context,
    )
    expected = o, *torch.autograd.grad(o, leaves, do.double())
    for one, other in zip(actual, expected, strict=True):
        assert (one.double() - other).norm() <= 8e-3 * other.norm()


@pytest.mark.parametrize(("channels", "values"), [(64, 32), (40, 24), (32, 128), (16, 64), (16, 32)])
def test_other_unequal_widths_are_made_equal_or_at_least_128_bytes(channels, values):
    narrow, wide = sorted(launch.widths(channels, values, 2))
    assert narrow == wide or narrow >= 64


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "last_first"),
    [
        ((5, 64, 0, 130, 64, 1), False),
        ((5, 64, 0, 130, 64, 1), True),
        ((3,), True),
        ((0, 0), False),
        pytest.param((1,) * 1030 + (200,), True, marks=LONG),
    ],
    ids=["mixed", "mixed-last-first", "one", "empty", "many"],
)
def test_every_tile_once_and_the_longest_sequences_first(lengths, last_first, device):
    offsets = offsets_of(lengths, device)
    tiles = launch.order_tiles(
        torch.empty(sum(lengths), 1, 1, device=offsets.device), len(lengths), offsets, 64, last_first
    )
    run_all(tiles.launches, offsets.device)
    records = [tuple(record) for record in tiles.order.tolist() if record[1] * 64 < record[3]]
    assert sorted((b, tile) for b, tile, _, _ in records) == [
        (b, tile) for b, length in enumerate(lengths) for tile in range(-(-length // 64))
    ]
    assert all(
        start == sum(lengths[:b]) and length == lengths[b] for b, _, start, length in records[:50] + records[-50:]
    )
    assert [length for *_, length in records] == sorted((length for *_, length in records), reverse=True)
    for (b, tile, *_), (next_b, next_tile, *_) in itertools.pairwise(records):
        assert b != next_b or next_tile == tile + (-1 if last_first else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(), (200, 0, 90)], ids=["dense", "packed"])
def test_chunks_of_the_queries_add_up(lengths, device):
    rows = (sum(lengths),) if lengths else (2, 150)
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(*rows, 2, 16, generator=generator).to(device) for _ in range(4))
    inputs = launch.Inputs(
        q, k, v, offsets_of(lengths, device) if lengths else None, None, launch.Mask(True, None, 0), 0.25, None, 1.0
    )
    whole, chunks = launch.backward(inputs, do), launch.backward(inputs, do, chunks=3)
    torch.testing.assert_close(chunks[0], whole[0], rtol=0, atol=0)
    for one, other in zip(chunks[1:], whole[1:], strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.unflatten(-3, (3, -1)).sum(-4), other, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_one_compiled_kernel_serves_other_sizes_and_alignments(device):
    """What runs a second time is not bound anew: sizes of 1 and multiples of 16, and tensors that begin elsewhere, must
    not mix.
    """
    for lengths, start in itertools.product([(16,), (17, 1), (1,), (48, 16), (33,)], [0, 1, 8]):
        tokens, generator = sum(lengths), torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(tokens, 3, 24 + start, generator=generator).to(device, torch.float16)[..., start:]
            for _ in range(3)
        )
        offsets = offsets_of(lengths, device)
        o = launch.forward(launch.make_inputs(q, k, v, offsets, None, 48, 0.2, True, 0, 0))
        expected = reference.hstu_attention(q.double(), k.double(), v.double(), offsets, max_seq_len=48, alpha=0.2)
        assert (o.double() - expected).abs().max() <= 2e-3 * expected.abs().max()
