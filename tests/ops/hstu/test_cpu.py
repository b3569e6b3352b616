"""What must not matter to the CPU backend: tiles, strides, the run, other sequences, torch's defaults."""

import pytest
import torch
from battery import first_quick

from tilewise import hstu_attention
from tilewise.ops.hstu import cpu

OFFSETS = torch.tensor([0, 40, 40, 110, 111])
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "targets": {"num_targets": torch.tensor([7, 0, 33, 1])},
    "near": {"max_attn_len": 5},
    "all": {"num_targets": torch.tensor([7, 0, 33, 1]), "max_attn_len": 5, "contextual_seq_len": 4},
    "all-full": {
        "num_targets": torch.tensor([40, 0, 33, 1]),
        "max_attn_len": 5,
        "contextual_seq_len": 4,
        "causal": False,
    },
}


def tensors(tokens=111, heads=3, channels=10, values=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, d, generator=generator).to(dtype) for d in (channels, channels, values, values)]


def run(q, k, v, do, offsets=OFFSETS, backend="cpu", **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = hstu_attention(*leaves, offsets, max_seq_len=80, backend=backend, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("blocks", first_quick([(8, 3), (1, 1), (3, 16), (1000, 1000)]))
def test_tiles_do_not_matter(options, blocks, monkeypatch):
    """With small tiles most are left out: what they hold takes no part."""
    given = tensors()
    truth = run(*(x.double() for x in given), backend="reference", **options)
    monkeypatch.setattr(cpu, "BLOCK_M", blocks[0])
    monkeypatch.setattr(cpu, "BLOCK_N", blocks[1])
    for actual, expected in zip(run(*given, **options), truth, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_tiles_that_no_query_sees_are_left_out(monkeypatch):
    """NaN in keys farther away than a whole tile reaches no query, for their tiles are never read."""
    monkeypatch.setattr(cpu, "BLOCK_M", 10)
    monkeypatch.setattr(cpu, "BLOCK_N", 10)
    q, k, v, do = tensors(80)
    offsets = torch.tensor([0, 80])
    expected = run(q, k, v, do, offsets, max_attn_len=3)
    k[:20], v[:20] = torch.nan, torch.nan
    o, dq, dk, dv = run(q, k, v, do, offsets, max_attn_len=3)
    assert o[:20].isnan().all()
    for actual, right in ((o, expected[0]), (dq, expected[1])):
        assert torch.equal(actual[30:], right[30:])
    for actual, right in ((dk, expected[2]), (dv, expected[3])):
        assert torch.equal(actual[30:], right[30:])


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_strides_do_not_matter(options):
    q, k, v, do = tensors()
    k = k[:, :1].expand(-1, 3, -1)
    around = torch.full((111, 5, 20), torch.nan)
    strided_v = around[:, 1:4, 3:9].copy_(v)
    strided = (
        q.transpose(0, 1).contiguous().transpose(0, 1),
        k,
        strided_v,
        do.transpose(0, 1).contiguous().transpose(0, 1),
    )
    for actual, expected in zip(run(*strided, **options), run(q, k.contiguous(), v, do, **options), strict=True):
        assert actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_offsets_and_targets_of_any_stride_and_width():
    given = tensors()
    expected = run(*given, num_targets=MASKS["all"]["num_targets"])
    narrow = OFFSETS.int().repeat_interleave(2)[::2], MASKS["all"]["num_targets"].int().repeat_interleave(3)[::3]
    assert not narrow[0].is_contiguous()
    assert_same(run(*given, offsets=narrow[0], num_targets=narrow[1]), expected)


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_repeatable(options):
    given = tensors(dtype=torch.bfloat16)
    assert_same(run(*given, **options), run(*given, **options))


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("backend", ["cpu", "reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_neighbours_of_a_sequence_never_reach_it(backend, options, device):
    """Sequences beside it may hold NaN: its outputs and gradients do not change by a bit."""
    place = device if backend == "triton" else torch.device("cpu")
    given = [x.to(place) for x in tensors()]
    options = {name: x.to(place) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    rows = slice(40, 110)

    def own():
        return [x[rows] for x in run(*given, OFFSETS.to(place), backend, **options)]

    expected = own()
    for x in given:
        x[:40] = torch.nan
        x[110:] = torch.nan
    actual = own()
    assert all(x.isfinite().all() for x in actual)
    assert_same(actual, expected)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths):
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    q, k, v, _ = (x.requires_grad_() for x in tensors(0))
    for longest in (0, 5):
        o = hstu_attention(
            q, k, v, offsets, max_seq_len=longest, num_targets=torch.tensor(lengths, dtype=torch.int64), backend="cpu"
        )
        assert o.shape == (0, 3, 6)
        assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [(0, 3, 10), (0, 3, 10), (0, 3, 6)]


def test_alpha_of_zero_gives_zero():
    assert all(not x.any() for x in run(*tensors(), alpha=0.0)[:3])


@pytest.mark.parametrize(
    "options", [{"max_attn_len": 2**62}, {"contextual_seq_len": 2**62}], ids=["max-attn-len", "context"]
)
def test_limits_beyond_every_sequence(options):
    """A limit no pair reaches cuts nothing; where all could be context and more, each token sees itself."""
    given = tensors()
    alone = {"num_targets": OFFSETS.diff()} if "contextual_seq_len" in options else {}
    for actual, expected in zip(run(*given, **options), run(*given, **alone), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torch_s_defaults_change_nothing(default):
    given = tensors()
    expected = run(*given, **MASKS["all"])
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        changed = run(*given, **MASKS["all"])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert_same(changed, expected)


def test_inputs_stay_as_they_are():
    given = tensors()
    before = [x.clone() for x in given]
    run(*given, **MASKS["all"])
    assert_same(given, before)
