"""What must not matter: what lies outside a sequence, strides, the tiles chosen, the run, the size of the tensors."""

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._device.records import Taps
from tilewise.ops.flash import launch
from tilewise.ops.flash.configs import TABLE, WIDTHS

needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a GPU")
pytestmark = pytest.mark.gpu


def tensors(device, *shapes, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def run(q, k, v, do, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = flash_attention(*leaves, return_lse=True, backend="triton", **options)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("channels", [64, 128])
def test_repeatable(channels, device):
    size = (2, 150, 2, channels) if device.type == "cpu" else (2, 1500, 8, channels)
    q, k, v, do = tensors(device, *[size] * 4)
    first = run(q, k, v, do, causal=True)
    for _ in range(1 if device.type == "cpu" else 20):
        assert_same(run(q, k, v, do, causal=True), first)


def test_the_batch_order_does_not_matter(device):
    q, k, v, do = tensors(device, *[(3, 70, 2, 64)] * 4)
    order = [2, 0, 1]
    expected = run(q, k, v, do, causal=True)
    assert_same(run(q[order], k[order], v[order], do[order], causal=True), [x[order] for x in expected])


@pytest.mark.parametrize("name", ["triton", "cpu"])
def test_neighbours_of_a_packed_sequence_never_reach_it(name, device):
    """Sequences beside it may hold NaN: its outputs and gradients do not change by a bit."""
    place = device if name == "triton" else torch.device("cpu")
    q, k, v, do = tensors(place, *[(150, 2, 32)] * 4)
    offsets = torch.tensor([0, 40, 110, 150], device=place)
    rows = slice(40, 110)

    def own(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        o, lse = flash_attention(*leaves, causal=True, cu_seqlens_q=offsets, return_lse=True, backend=name)
        gradients = torch.autograd.grad(o, leaves, inputs[3])
        return [o[rows].detach(), lse[:, rows].detach(), *(x[rows] for x in gradients)]

    expected = own(q, k, v, do)
    for x in (q, k, v, do):
        x[:40] = torch.nan
        x[110:] = torch.nan
    actual = own(q, k, v, do)
    assert all(x.isfinite().all() for x in actual)
    assert_same(actual, expected)


def test_memory_around_strided_inputs_never_reaches_them(device):
    """Inputs cut out of tensors full of NaN: what lies beyond the last row and the last channel is not part of the
    problem.
    """
    plain = tensors(device, (1, 70, 2, 40), (1, 75, 2, 40), (1, 75, 2, 24), (1, 70, 2, 24))

    def cut(x):
        around = torch.full((1, x.shape[1] + 60, 3, x.shape[3] + 24), torch.nan, dtype=x.dtype, device=device)
        inside = around[:, : x.shape[1], :2, 8 : 8 + x.shape[3]]
        return inside.copy_(x)

    expected = run(*plain, causal=True)
    assert all(x.isfinite().all() for x in expected)
    for actual, truth in zip(run(*map(cut, plain), causal=True), expected, strict=True):
        # The wider strides may choose other tiles, so other roundings.
        torch.testing.assert_close(actual, truth, rtol=2e-2, atol=2e-2)


# One of each padded width: 16, 32, 64, 128 and 256.
WIDTH_PAIRS = (8, 24, 40, 72, 200)


@pytest.mark.parametrize("channels", WIDTH_PAIRS)
def test_every_pair_of_widths(channels, device):
    """Tiles of different widths side by side, read through descriptors and not (packed): Triton 3.6 gets some of them
    wrong on Hopper.
    """
    values_of = WIDTH_PAIRS if device.type == "cuda" else (24, 64)
    for values in values_of:
        for packed in (False, True) if device.type == "cuda" else (True,):
            tokens = 300 if device.type == "cuda" else 65
            batch = () if packed else (1,)
            q, k, v, do = tensors(device, *((*batch, tokens, 2, d) for d in (channels, channels, values, values)))
            offsets = {"cu_seqlens_q": torch.tensor([0, 41, tokens], device=device)} if packed else {}
            actual = run(q, k, v, do, causal=True, **offsets)
            leaves = [x.double().requires_grad_() for x in (q, k, v)]
            o, lse = flash_attention(*leaves, causal=True, return_lse=True, backend="reference", **offsets)
            expected = [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do.double())]
            for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
                error = (a.double() - b).norm() / b.norm()
                assert error < 1e-2, (name, channels, values, packed, error)


def test_inputs_stay_as_they_are(device):
    given = tensors(device, *[(1, 70, 2, 32)] * 4)
    before = [x.clone() for x in given]
    run(*given, causal=True)
    assert_same(given, before)


def test_taps_write_named_values_of_one_program(device):
    q, k, v = tensors(device, (1, 100, 1, 16), (1, 200, 1, 16), (1, 200, 1, 16), dtype=torch.float32)
    inputs = launch.make_inputs(q, k, v, None, None, False, -1, -1, 0.25, 0.0)
    config = launch.Config(64, 64, 4, 1)
    slots, size = 9, 64 * 64
    buffer = torch.full((4, slots, size), torch.nan, device=device)
    plain = launch.forward(inputs, config)
    for tapped, without in zip(launch.forward(inputs, config, taps=Taps(buffer, 1, slots, size)), plain, strict=True):
        torch.testing.assert_close(tapped, without, rtol=1e-5, atol=1e-5)
    # Program 1 owns queries 64 to 99; step 1 is keys 64 to 127, in base 2 with scale · log2(e).
    rows, keys = q[0, 64:, 0].double(), k[0, :128, 0].double()
    scores = rows @ keys.T
    torch.testing.assert_close(buffer[1, 2].view(64, 64)[:36].double(), scores[:, 64:], rtol=1e-5, atol=1e-5)
    m = scores.amax(1) * 0.25 * launch.LOG2E
    torch.testing.assert_close(buffer[1, 3, :36].double(), m, rtol=1e-5, atol=1e-5)
    p = torch.exp2(scores * 0.25 * launch.LOG2E - m[:, None])
    torch.testing.assert_close(buffer[1, 4, :36].double(), p.sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(buffer[1, 5].view(64, 64)[:36].double(), p[:, 64:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        buffer[1, 8, : 64 * 16].view(64, 16)[:36].double(), p @ v[0, :128, 0].double(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("chunks", "packed"), [(2, False), (6, False), (3, True)], ids=str)
def test_the_chunks_of_a_group_add_up(chunks, packed, device):
    """dK and dV by chunks of a group's query heads, bit for bit the same from run to run."""
    lead = (150,) if packed else (1, 150)
    q, k, v, do = tensors(device, *((*lead, heads, 32) for heads in (6, 1, 1, 6)))
    offsets = torch.tensor([0, 40, 40, 150], device=device) if packed else None
    inputs = launch.make_inputs(q, k, v, offsets, offsets, True, -1, -1, 0.2, 0.0)
    o, lse = launch.forward(inputs)
    config = launch.Config(128, 64, 4, 1)
    expected = launch.backward(inputs, o, lse, do, None, config, config)
    first = launch.backward(inputs, o, lse, do, None, config._replace(chunks=chunks), config)
    for actual, whole in zip(first, expected, strict=True):
        assert actual.dtype == whole.dtype
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, whole, rtol=2e-2, atol=2e-2)
    if device.type == "cuda":
        assert_same(launch.backward(inputs, o, lse, do, None, config._replace(chunks=chunks), config), first)


CONFIGS = sorted(
    {
        (kernel, size, width, config)
        for (_, size, kernel), rows in TABLE.items()
        for width, row in zip(WIDTHS, rows, strict=True)
        for config in row
    },
    key=str,
)


@needs_gpu
@pytest.mark.parametrize(("kernel", "size", "width", "config"), CONFIGS, ids=str)
def test_every_configuration(kernel, size, width, config, device):
    """All tiles of the table, those of other cards too, give what the reference gives."""
    dtype = torch.bfloat16 if size == 2 else torch.float32
    q, k, v, do = tensors(device, *[(2, 333, 2, width)] * 4, dtype=dtype)
    inputs = launch.make_inputs(q, k, v, None, None, True, 200, -1, width**-0.5, 0.0)
    o, lse = launch.forward(inputs, config if kernel == "fwd" else None)
    gradients = launch.backward(
        inputs, o, lse, do, None, config if kernel == "dkdv" else None, config if kernel == "dq" else None
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    truth = flash_attention(*leaves, causal=True, window_size=(200, -1), backend="reference")
    expected = [truth.detach(), *torch.autograd.grad(truth, leaves, do.double())]
    for actual, right in zip((o, *gradients), expected, strict=True):
        error = (actual.double() - right).norm() / right.norm()
        assert error < (1e-2 if size == 2 else 1e-5), error


@needs_gpu
def test_more_than_2_to_the_31_elements(device):
    """Rows whose offset overflows 32 bits, forward and backward; a window keeps the work small."""
    tokens, heads, channels = 2**20 + 77, 16, 128
    q, k, v, do = (torch.randn(1, tokens, heads, channels, device=device, dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    actual = run(q, k, v, do, causal=True, window_size=(63, 0))
    cut = slice(tokens - 512, tokens)
    expected = run(*(x[:, cut].contiguous() for x in (q, k, v, do)), causal=True, window_size=(63, 0))
    rows = slice(-256, None)
    for a, b in zip(actual, expected, strict=True):
        a, b = (x[..., rows] if x.dim() == 3 else x[:, rows] for x in (a, b))
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        assert a.isfinite().all()


@needs_gpu
def test_compiled_by_inductor(device):
    q, k, v = (x.requires_grad_() for x in tensors(device, *[(2, 130, 4, 64)] * 3))
    compiled = torch.compile(lambda q, k, v: flash_attention(q * 1.5, k, v, causal=True).sin(), fullgraph=True)
    o = compiled(q, k, v)
    expected = flash_attention(q * 1.5, k, v, causal=True).sin()
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
    torch.autograd.grad(o.sum(), (q, k, v))
