"""The reference against brute force, one loop a query, and against numerical derivatives."""

import math

import pytest
import torch

from tilewise.ops.flash.reference import flash_attention

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "causal-window": {"causal": True, "window_size": (2, 4)},
    "softcap": {"softcap": 1.5},
    "negative-scale": {"scale": -0.7, "causal": True},
    "sinks": {"sinks": (0.5, -torch.inf, -1.0, 2.0), "softcap": 1.5, "scale": -0.7, "causal": True},
}


def inputs(queries=7, keys=9, heads=4, kv_heads=2, channels=3, values=5):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, queries, heads, channels), (2, keys, kv_heads, channels), (2, keys, kv_heads, values)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def brute_force(q, k, v, causal=False, window_size=(-1, -1), scale=None, softcap=0.0, sinks=None):
    """Straight from the definition, in Python numbers."""
    batch, queries, heads, channels = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    scale = channels**-0.5 if scale is None else scale
    o = torch.zeros(batch, queries, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                weights = {}
                for j in range(keys):
                    at = i + keys - queries
                    left, right = window_size
                    if (causal and j > at) or (left >= 0 and j < at - left) or (right >= 0 and j > at + right):
                        continue
                    s = scale * sum(q[b, i, h, d].item() * k[b, j, h // group, d].item() for d in range(channels))
                    weights[j] = math.exp(softcap * math.tanh(s / softcap) if softcap else s)
                total = sum(weights.values()) + (math.exp(sinks[h]) if sinks is not None else 0.0)
                if total:
                    lse[b, h, i] = math.log(total)
                for j, weight in weights.items():
                    o[b, i, h] += weight / total * v[b, j, h // group]
    return o, lse


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("keys", [9, 4], ids=["more-keys", "rows-that-see-nothing"])
def test_brute_force(options, keys):
    q, k, v = inputs(keys=keys)
    options = options | ({"sinks": torch.tensor(options["sinks"])} if "sinks" in options else {})
    for actual, expected in zip(flash_attention(q, k, v, **options), brute_force(q, k, v, **options), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("keys", [5, 2], ids=["more-keys", "rows-that-see-nothing"])
def test_gradcheck(options, keys):
    q, k, v = (x.requires_grad_() for x in inputs(queries=4, keys=keys, heads=2, kv_heads=1))
    sinks = options.get("sinks") and torch.tensor(options["sinks"][2:], dtype=torch.float64, requires_grad=True)

    def finite(q, k, v, sinks):
        o, lse = flash_attention(q, k, v, **options | {"sinks": sinks})
        return o, lse[lse.isfinite()]

    assert torch.autograd.gradcheck(finite, (q, k, v, sinks))


def test_packed_is_each_sequence_alone():
    q, k, v = inputs(queries=10, keys=10)
    q, k, v = q[0], k[0], v[0]
    ends_q, ends_k = [0, 4, 4, 10], [0, 1, 6, 10]
    o, lse = flash_attention(q, k, v, causal=True, cu_seqlens_q=torch.tensor(ends_q), cu_seqlens_k=torch.tensor(ends_k))
    for b in range(3):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        alone = flash_attention(q[None, rows], k[None, keys], v[None, keys], causal=True)
        torch.testing.assert_close(o[rows], alone[0][0], rtol=0, atol=0)
        torch.testing.assert_close(lse[:, rows], alone[1][0], rtol=0, atol=0)


def test_no_sequence_at_all():
    q, k, v = (x[0, :0] for x in inputs())
    o, lse = flash_attention(q, k, v, cu_seqlens_q=torch.zeros(1, dtype=torch.int32))
    assert o.shape == (0, 4, 5)
    assert lse.shape == (4, 0)


def test_16_bits_are_computed_in_fp32():
    q, k, v = (x.bfloat16() for x in inputs())
    o, lse = flash_attention(q, k, v)
    wide_o, wide_lse = flash_attention(q.float(), k.float(), v.float())
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(o, wide_o.bfloat16())
    assert torch.equal(lse, wide_lse)
