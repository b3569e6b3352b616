"""The reference against brute force, one loop a pair, and against numerical derivatives."""

import itertools
import math

import pytest
import torch

from tilewise.ops.hstu.reference import hstu_attention, keep_mask

LENGTHS = (7, 0, 1, 9)
CASES = {
    "causal": {},
    "full": {"causal": False},
    "targets": {"num_targets": (2, 0, 1, 3)},
    "targets-full": {"num_targets": (2, 0, 1, 3), "causal": False},
    "max-attn-len-1": {"max_attn_len": 1},
    "max-attn-len": {"max_attn_len": 3, "num_targets": (2, 0, 0, 3)},
    "max-attn-len-full": {"max_attn_len": 3, "causal": False},
    "context": {"contextual_seq_len": 3},
    "context-targets": {"contextual_seq_len": 3, "num_targets": (7, 0, 1, 6)},
    "all": {"contextual_seq_len": 2, "num_targets": (2, 0, 1, 3), "max_attn_len": 2},
    "all-full": {"contextual_seq_len": 2, "num_targets": (2, 0, 1, 3), "max_attn_len": 2, "causal": False},
    "alpha": {"alpha": -0.6},
}


def inputs(lengths=LENGTHS, heads=2, channels=3, values=5):
    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    shapes = (tokens, heads, channels), (tokens, heads, channels), (tokens, heads, values)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def offsets(lengths=LENGTHS):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def as_tensors(options):
    return options | ({"num_targets": torch.tensor(options["num_targets"])} if "num_targets" in options else {})


def sees(i, j, length, causal, targets, max_attn_len, context):
    """Whether query i sees key j, token by token from the definition."""

    def identity(at):
        if context > 0:
            at = max(at - context + 1, 0)
        return min(at, end)

    end = length - targets
    if context > 0:
        end -= context - 1
    d = identity(i) - identity(j)
    if not causal:
        d = abs(d)
    near = max_attn_len == 0 or d <= max_attn_len
    if (i == j or d > 0) and near:
        return True
    return context > 0 and identity(i) == 0 and identity(j) < end


def brute_force(
    q, k, v, lengths, max_seq_len, alpha=None, causal=True, num_targets=None, max_attn_len=0, contextual_seq_len=0
):
    """Straight from the definition, in Python numbers."""
    tokens, heads, channels = q.shape
    alpha = channels**-0.5 if alpha is None else alpha
    o = torch.zeros(tokens, heads, v.shape[-1], dtype=torch.float64)
    start = 0
    for b, length in enumerate(lengths):
        targets = num_targets[b] if num_targets else 0
        for h, i, j in itertools.product(range(heads), range(length), range(length)):
            if sees(i, j, length, causal, targets, max_attn_len, contextual_seq_len):
                s = alpha * sum(q[start + i, h, d].item() * k[start + j, h, d].item() for d in range(channels))
                o[start + i, h] += s / (1 + math.exp(-s)) / max_seq_len * v[start + j, h]
        start += length
    return o


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_brute_force(options):
    q, k, v = inputs()
    actual = hstu_attention(q, k, v, offsets(), max_seq_len=11, **as_tensors(options))
    torch.testing.assert_close(actual, brute_force(q, k, v, LENGTHS, 11, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("context", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("max_attn_len", [0, 1, 3, 9])
def test_the_mask_of_every_small_sequence(causal, context, max_attn_len):
    for length in range(7):
        for targets in range(length + 1):
            mask = keep_mask(length, causal, targets, max_attn_len, context, torch.device("cpu"))
            expected = [
                [sees(i, j, length, causal, targets, max_attn_len, context) for j in range(length)]
                for i in range(length)
            ]
            assert mask.tolist() == expected, (length, targets)
        none = keep_mask(length, causal, None, max_attn_len, context, torch.device("cpu"))
        assert torch.equal(none, keep_mask(length, causal, 0, max_attn_len, context, torch.device("cpu")))


def test_the_mask_by_hand():
    """Two contextual tokens, then three, then two targets."""
    mask = keep_mask(7, True, 2, 0, 2, torch.device("cpu"))
    assert mask.int().tolist() == [
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    "options",
    [pytest.param(x, id=name, marks=pytest.mark.slow if i % 3 else []) for i, (name, x) in enumerate(CASES.items())],
)
def test_gradcheck(options):
    lengths = (5, 0, 1, 4)
    limited = options | (
        {"num_targets": tuple(map(min, options["num_targets"], lengths))} if "num_targets" in options else {}
    )
    q, k, v = (x.requires_grad_() for x in inputs(lengths, heads=2, channels=2, values=3))
    assert torch.autograd.gradcheck(
        lambda *x: hstu_attention(*x, offsets(lengths), max_seq_len=5, **as_tensors(limited)), (q, k, v)
    )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_packed_is_each_sequence_alone(options):
    q, k, v = inputs()
    o = hstu_attention(q, k, v, offsets(), max_seq_len=9, **as_tensors(options))
    for b, (start, stop) in enumerate(itertools.pairwise(offsets().tolist())):
        one = options | ({"num_targets": options["num_targets"][b : b + 1]} if "num_targets" in options else {})
        alone = hstu_attention(
            *(x[start:stop] for x in (q, k, v)), torch.tensor([0, stop - start]), max_seq_len=9, **as_tensors(one)
        )
        assert torch.equal(o[start:stop], alone)


def test_other_sequences_change_nothing_even_where_nan():
    q, k, v = (x.requires_grad_() for x in inputs())
    rows = slice(7, 17)

    def own(*tensors):
        o = hstu_attention(
            *tensors, offsets(), max_seq_len=9, contextual_seq_len=2, num_targets=torch.tensor([1, 0, 0, 2])
        )[rows]
        return [o.detach(), *(x[rows] for x in torch.autograd.grad(o.sum(), tensors))]

    expected = own(q, k, v)
    beside = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        for x in beside:
            x[:7] = torch.nan
    for actual, right in zip(own(*beside), expected, strict=True):
        assert actual.isfinite().all()
        assert torch.equal(actual, right)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths):
    q, k, v = (x.requires_grad_() for x in inputs(lengths))
    o = hstu_attention(
        q, k, v, offsets(lengths), max_seq_len=4, num_targets=torch.zeros(len(lengths), dtype=torch.int32)
    )
    assert o.shape == (0, 2, 5)
    assert [x.shape for x in torch.autograd.grad(o.sum(), (q, k, v))] == [(0, 2, 3), (0, 2, 3), (0, 2, 5)]


def test_targets_alone_see_themselves():
    q, k, v = inputs((4,))
    o = hstu_attention(q, k, v, offsets((4,)), max_seq_len=4, num_targets=torch.tensor([4]))
    s = (q * k).sum(-1, keepdim=True) * 3**-0.5
    torch.testing.assert_close(o, s * s.sigmoid() / 4 * v, rtol=1e-12, atol=1e-12)


def test_16_bits_are_computed_in_fp32():
    q, k, v = (x.bfloat16() for x in inputs())
    o = hstu_attention(q, k, v, offsets(), max_seq_len=9)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, hstu_attention(q.float(), k.float(), v.float(), offsets(), max_seq_len=9).bfloat16())
    eager = hstu_attention(q, k, v, offsets(), max_seq_len=9, compute_dtype=torch.bfloat16)
    assert eager.dtype == torch.bfloat16
    assert not torch.equal(o, eager)
