"""The simulation is the algorithm: in fp64 it equals the reference, and in a kernel's precision what the
kernel stores.
"""

import itertools

import pytest
import torch
from battery import first_quick

from tilewise.ops.hstu import configs, launch, simulate
from tilewise.ops.hstu.reference import hstu_attention
from tilewise.ops.hstu.simulate import Options, Tiling

TILES = sorted({(config.block_m, config.block_n) for rows in configs.TABLE.values() for row in rows for config in row})
# Tokens and the rest; max_seq_len is 200 and alpha 0.3 where nothing else is said.
PROBLEMS = {
    "causal": (150, Options(0.3, 200)),
    "full": (70, Options(0.3, 200, causal=False)),
    "limit": (140, Options(0.3, 200, max_attn_len=20)),
    "limit-both-ways": (140, Options(0.3, 200, causal=False, max_attn_len=20)),
    "targets": (150, Options(0.3, 200, targets=40)),
    "targets-full": (150, Options(0.3, 200, causal=False, targets=70)),
    "targets-limit": (150, Options(0.3, 200, targets=40, max_attn_len=9)),
    "context": (150, Options(0.3, 200, contextual_seq_len=40)),
    "context-targets-limit": (150, Options(0.3, 200, targets=40, max_attn_len=9, contextual_seq_len=37)),
    "context-targets-full": (100, Options(0.3, 200, causal=False, targets=20, max_attn_len=30, contextual_seq_len=5)),
    "nothing-but-context": (40, Options(0.3, 200, contextual_seq_len=60)),
    "nothing-but-targets": (40, Options(0.3, 200, targets=40)),
    "context-meets-targets": (40, Options(0.3, 200, targets=30, contextual_seq_len=20)),
    "negative": (70, Options(-0.3, 200)),
    "zero": (40, Options(0.0, 200)),
    "one-token": (1, Options(0.3, 200, targets=1)),
}


def tensors(tokens, heads, dtype=torch.float64):
    """q, k, v and do, [T, H, channels]."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, channels, generator=generator, dtype=torch.float64).to(dtype)
        for channels in (16, 16, 24, 24)
    ]


def reference(q, k, v, options):
    """One sequence, [T, H, channels]."""
    return hstu_attention(
        q,
        k,
        v,
        torch.tensor([0, q.shape[0]]),
        max_seq_len=options.max_seq_len,
        alpha=options.alpha,
        causal=options.causal,
        num_targets=torch.tensor([options.targets]) if options.targets else None,
        max_attn_len=options.max_attn_len,
        contextual_seq_len=options.contextual_seq_len,
    )


def joined(program, name, tokens, block):
    """The `name` of every tile of one head."""
    return torch.cat([dict(program(start))[name] for start in range(0, tokens, block)])[:tokens]


def simulated(q, k, v, do, tiling, options):
    """o, dq, dk and dv of one head."""
    tokens = q.shape[0]
    keys = [dict(simulate.backward_dkdv(q, k, v, do, i_n, tiling, options)) for i_n in range(0, tokens, tiling.block_n)]
    return (
        joined(lambda i_m: simulate.forward(q, k, v, i_m, tiling, options), "O_final", tokens, tiling.block_m),
        joined(lambda i_m: simulate.backward_dq(q, k, v, do, i_m, tiling, options), "dQ_final", tokens, tiling.block_m),
        torch.cat([values["dK_final"] for values in keys])[:tokens],
        torch.cat([values["dV_final"] for values in keys])[:tokens],
    )


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_equals_the_reference_in_fp64(problem, tiles):
    tokens, options = PROBLEMS[problem]
    q, k, v, do = tensors(tokens, 1)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = reference(q, k, v, options)
    expected = torch.autograd.grad(o, [q, k, v], do)
    with torch.no_grad():
        ours = simulated(*(x[:, 0] for x in (q, k, v, do)), Tiling(*tiles), options)
    for actual, truth in zip(ours, (o, *expected), strict=True):
        torch.testing.assert_close(actual, truth.detach()[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_gain_changes_no_result(problem):
    tokens, options = PROBLEMS[problem]
    rows = [x[:, 0] for x in tensors(tokens, 1)]
    changed = Options(**{**vars(options), "gain": 0.25})
    for plain, gained in zip(*(simulated(*rows, Tiling(32, 16), one) for one in (options, changed)), strict=True):
        torch.testing.assert_close(gained, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_pair_that_is_kept_lies_in_a_tile_that_is_walked(problem):
    tokens, options = PROBLEMS[problem]
    tiling = Tiling(32, 16)
    for i_m, i_n in itertools.product(range(0, tokens, 32), range(0, tokens, 16)):
        if simulate.keep(i_m, i_n, tokens, tiling, options, torch.device("cpu"))[: tokens - i_m].any():
            assert i_n in simulate.key_blocks(i_m, tokens, tiling, options)
            assert i_m in simulate.query_blocks(i_n, tokens, tiling, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float32, torch.float16]), ids=str)
@pytest.mark.parametrize(
    "problem", ["causal", "limit-both-ways", "targets-full", "context-targets-limit", "context-meets-targets"]
)
def test_the_kernel_stores_what_the_simulation_makes(problem, dtype, device):
    tokens, options = PROBLEMS[problem]
    q, k, v, do = (x.to(device) for x in tensors(tokens, 2, dtype))
    targets = torch.tensor([options.targets], device=device) if options.targets else None
    offsets = torch.tensor([0, tokens], device=device)
    numbers = (options.max_seq_len, options.alpha, options.causal, options.max_attn_len, options.contextual_seq_len)
    inputs = launch.make_inputs(q, k, v, offsets, targets, *numbers)
    config = configs.Config(32, 32, 4, 1)
    made = launch.forward(inputs, config), *launch.backward(inputs, do, config, config)
    for head in range(2):
        ours = simulated(
            *(x[:, head] for x in (q, k, v, do)),
            Tiling(32, 32),
            Options(**{**vars(options), "gain": inputs.gain or 1.0}),
        )
        for actual, simulation in zip(made, ours, strict=True):
            # Where rounding falls the other way once, a 16-bit value moves by its last bit.
            allowed = (2e-5 if dtype == torch.float32 else 2**-6) * simulation.abs().max().item()
            torch.testing.assert_close(actual[:, head].float(), simulation.float(), rtol=0, atol=allowed)
