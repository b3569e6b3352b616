"""Inputs of native sparse attention by name, small cases of it, and what a function makes of them: shared
by its tests.
"""

import torch

from tilewise import native_sparse_attention

GATES = ("g_cmp", "g_slc", "g_swa")
SMALL = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4, "window_size": 9}
LENGTHS = (0, 23, 7, 0, 45, 1)


def windows(tokens, size=8, stride=4):
    return max(0, (tokens - size) // stride + 1)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def random(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def inputs(
    tokens=77,
    *,
    heads=4,
    kv_heads=2,
    channels=16,
    values=12,
    batch=2,
    packed=False,
    learned=False,
    gates=GATES,
    dtype=torch.float32,
):
    """By name: q, k, v, the gates, and, where learned, k_cmp and v_cmp; packed: sequences of LENGTHS."""
    rows, count = (
        (sum(LENGTHS),) if packed else (batch, tokens),
        sum(map(windows, LENGTHS)) if packed else windows(tokens),
    )
    of_windows = (count,) if packed else (batch, count)
    q, k, v, k_cmp, v_cmp = random(
        (*rows, heads, channels),
        (*rows, kv_heads, channels),
        (*rows, kv_heads, values),
        (*of_windows, kv_heads, channels),
        (*of_windows, kv_heads, values),
        dtype=dtype,
    )
    tensors = {"q": q, "k": k, "v": v} | {
        name: torch.sigmoid(x) for name, x in zip(gates, random(*[(*rows, heads)] * len(gates)), strict=True)
    }
    return tensors | ({"k_cmp": k_cmp, "v_cmp": v_cmp} if learned else {})


def differentiate(function, tensors):
    """Outputs and gradients of the sum of finite outputs, each weighted by random numbers; a gradient that does not
    exist is 0.
    """
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    outputs = function(**leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = random(*(o.shape for o in outputs), seed=1)
    total = sum((o.masked_fill(o.isinf(), 0.0) * w.to(o.dtype)).sum() for o, w in zip(outputs, weights, strict=True))
    return [*(o.detach() for o in outputs), *torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)]


def assert_close(actual, expected, tolerance=2e-5):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape, i
        assert torch.equal(a.isinf(), b.isinf()), i
        finite = b.isfinite()
        largest = b[finite].abs().max().item() if finite.any() else 0.0
        torch.testing.assert_close(
            a[finite].double(),
            b[finite].double(),
            rtol=0.0,
            atol=tolerance * max(largest, 1.0),
            msg=lambda text, i=i: f"{i}: {text}",
        )


def assert_right(function, tensors, tolerance=2e-5):
    """The CPU backend gives what the reference gives in fp64."""
    truth = differentiate(
        lambda **x: function(**x, backend="reference"), {name: x.double() for name, x in tensors.items()}
    )
    assert_close(differentiate(lambda **x: function(**x, backend="cpu"), tensors), truth, tolerance)


CASES = {
    "plain": {},
    "defaults": {
        "tokens": 300,
        "options": {"compress_size": 32, "compress_stride": 16, "block_size": 64, "block_count": 3, "window_size": 100},
    },
    "one-head": {"heads": 1, "kv_heads": 1},
    "group-of-3": {"heads": 3, "kv_heads": 1},
    "no-groups": {"heads": 3, "kv_heads": 3},
    "narrow-q": {"channels": 3, "values": 20},
    "one-channel": {"channels": 1, "values": 1},
    "learned": {"learned": True},
    "disjoint-windows": {"options": {"compress_size": 4}},
    "long-windows": {"options": {"compress_size": 24}},
    "blocks-of-a-stride": {"options": {"block_size": 4, "block_count": 5}},
    "nothing-forced": {"options": {"init_blocks": 0, "local_blocks": 0}},
    "all-forced": {"options": {"init_blocks": 2, "local_blocks": 2}},
    "one-block": {"options": {"block_count": 1, "init_blocks": 0, "local_blocks": 1}},
    "every-block": {"options": {"block_count": 100}},
    "window-of-one": {"options": {"window_size": 1}},
    "window-of-all": {"options": {"window_size": 10**6}},
    "scale-0": {"options": {"scale": 0.0}},
    "scale-negative": {"options": {"scale": -0.7}},
    "one-token": {"tokens": 1},
    "no-window": {"tokens": 7},
    "one-window": {"tokens": 8},
    "no-tokens": {"tokens": 0},
    "no-batch": {"batch": 0},
    "cmp": {"gates": ("g_cmp",)},
    "cmp-learned": {"gates": ("g_cmp",), "learned": True},
    "slc": {"gates": ("g_slc",)},
    "slc-learned": {"gates": ("g_slc",), "learned": True},
    "swa": {"gates": ("g_swa",)},
    "cmp-swa": {"gates": ("g_cmp", "g_swa")},
    "packed": {"packed": True},
    "packed-learned": {"packed": True, "learned": True},
    "packed-slc": {"packed": True, "gates": ("g_slc",)},
    "packed-cmp-learned": {"packed": True, "learned": True, "gates": ("g_cmp",)},
}


def case(name):
    """A case's tensors and options, with the blocks that the CPU backend chooses, for both sides to attend."""
    made = dict(CASES[name])
    options = SMALL | made.pop("options", {})
    tensors = inputs(**made)
    options |= {name: None for name in GATES if name not in tensors}
    options |= {"cu_seqlens": cumulative(LENGTHS)} if made.get("packed") else {}
    if "g_slc" in tensors:
        _, chosen = native_sparse_attention(**tensors, **options, return_indices=True, backend="cpu")
        options["block_indices"] = chosen
    return tensors, options


def attend_inputs(index_heads, tokens=45, slots=3, scaled=True):
    q, k, v, sel_scale = random(
        (2, 4, tokens, 16), (2, 2, tokens, 16), (2, 2, tokens, 12), (2, index_heads, tokens, slots)
    )
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(0, -(-tokens // 8), sel_scale.shape, generator=generator)
    mask = torch.rand(sel_scale.shape, generator=generator) < 0.7
    named = {"block_size": 8, "selected_block_indices": chosen.masked_fill(~mask, 10**9), "fmask": mask}
    return {"fq": q, "fk": k, "fv": v} | ({"sel_scale": sel_scale} if scaled else {}), named
