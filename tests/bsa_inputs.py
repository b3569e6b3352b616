"""Inputs of block-sparse attention by name, and what a function makes of them: shared by its tests."""

import torch

GATES = ("g_cmp", "g_slc", "g_swa")
LENGTHS = (0, 23, 7, 0, 45, 1)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def random(*shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def inputs(tokens=77, *, heads=4, channels=16, values=12, batch=2, packed=False, gates=GATES, dtype=torch.float32):
    """By name: q, k, v, u and the gates, those that are not in `gates` None; packed: sequences of LENGTHS."""
    rows = (sum(LENGTHS),) if packed else (batch, tokens)
    q, k, v, u, *given = random(
        *[(*rows, heads, channels)] * 2, *[(*rows, heads, values)] * 2, *[(*rows, heads)] * 3, dtype=dtype
    )
    named = {name: gate.float().sigmoid() if name in gates else None for name, gate in zip(GATES, given, strict=True)}
    return {"q": q, "k": k, "v": v, "u": u, **named}


def differentiate(function, tensors):
    """The output, the blocks, and the gradients of the output weighted by random numbers; a gradient that does not
    exist is 0.
    """
    leaves = {name: None if x is None else x.detach().requires_grad_() for name, x in tensors.items()}
    o, block_indices = function(**leaves)
    (weight,) = random(o.shape, seed=1)
    wanted = [x for x in leaves.values() if x is not None]
    return [
        o.detach(),
        block_indices,
        *torch.autograd.grad((o * weight.to(o.dtype)).sum(), wanted, materialize_grads=True),
    ]


def assert_close(actual, expected, tolerance=2e-5):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == b.shape, i
        largest = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b.double(), rtol=0.0, atol=tolerance * max(largest, 1.0), msg=lambda text, i=i: f"{i}: {text}"
        )
