"""What the kernels do with values that nobody checked, with NaN, and at the edges of sizes."""

from functools import partial

import pytest
import torch

from tilewise import block_sparse_attn
from tilewise.ops.bsa import configs, launch, reference
from tilewise.ops.bsa.choose.launch import choose
from tilewise.ops.bsa.configs import Options
from tilewise.ops.bsa.selected import launch as selected
from tilewise.ops.nsa import configs as nsa_configs
from tilewise.verify import verify

# What takes long to interpret is left to the slow set, and to a GPU.
LONG = [] if torch.cuda.is_available() else [pytest.mark.slow]


def run(q, gates, cu, options):
    # Programs of an earlier call would not see what a test has changed since.
    launch.forward.forget()
    launch.backward.forget()
    results = launch.forward(q, q, q, q, gates, cu, options)
    return results, launch.backward(q, q, q, q, q, gates, *results[1:], cu, options)


@pytest.mark.gpu
def test_bad_offsets_never_lead_out_of_bounds(device):
    """Offsets that decrease.

    Memory around q holds huge numbers, so that a read out of bounds shows; results may be anything else.
    """
    around = torch.full((768, 2, 16), 1e15, device=device)
    around[256:512] = torch.randn(256, 2, 16, generator=torch.Generator().manual_seed(0)).to(device)
    cu = torch.tensor([0, 256, 0, 256], dtype=torch.int32, device=device)
    results, gradients = run(around[256:512], (None, None, None), cu, Options(3, 32, 9, 0.25, True))
    for x in (results.o, results.o_cmp, results.o_slc, results.o_swa, *gradients[:4]):
        assert not (x.isfinite() & (x.abs() > 1e6)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, pytest.param(2, marks=LONG), pytest.param(64, marks=LONG)])
def test_the_choice_is_the_references_even_where_scores_tie_or_are_nan(count, device):
    """Keys in whole numbers make equal scores common, SiLU's two branches among them; one block's mean is NaN and must
    be the last choice.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-2, 3, (1, 150, 2, 4), generator=generator).float().to(device)
    k = torch.randint(-1, 2, (1, 150, 2, 4), generator=generator).float().to(device)
    # Exact means of two keys, so that rounding breaks no tie.
    k_cmp = k.unflatten(1, (-1, 2)).mean(2)
    k_cmp[:, 5] = torch.nan
    indices, public = choose(q, k_cmp, None, None, count, 2, 1, 1.0)
    scores = reference.choice_scores(q, k_cmp.repeat_interleave(2, 1), block_size=2, scale=1.0)
    expected = reference._choose(scores, count)
    # A sigmoid in two fast operations rounds as it does: equal sums give equal scores, others may swap where they
    # differ by a rounding.
    same = (public == expected).all(-1)
    assert same.float().mean() > 0.97
    taken = scores.gather(-1, public.long().clamp(min=0)).sort(-1).values
    wanted = scores.gather(-1, expected.long().clamp(min=0)).sort(-1).values
    torch.testing.assert_close(taken, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(indices.transpose(-3, -2), public, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=LONG)])
def test_chunks_of_tokens_change_only_roundings(packed, device, monkeypatch):
    """Results by entry that do not fit at once: later chunks go on from the sums of the earlier."""
    generator = torch.Generator().manual_seed(0)
    rows = (170,) if packed else (2, 85)
    q = torch.randn(*rows, 2, 16, generator=generator).to(device)
    gates = tuple(torch.rand(*rows, 2, generator=generator).to(device) for _ in range(2))
    cu = torch.tensor([0, 100, 100, 170], device=device) if packed else None
    options = Options(3, 16, 0, 0.25, True)
    whole = run(q, (*gates, None), cu, options)
    monkeypatch.setattr(nsa_configs, "PARTIAL_BYTES", 1)
    chunked = run(q, (*gates, None), cu, options)
    for one, other in zip((chunked[0].o, *chunked[1][:6]), (whole[0].o, *whole[1][:6]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_chunks_of_queries_change_only_roundings(packed, device, monkeypatch):
    """The means' gradients from two chunks of the queries, which the kernel that adds up the keys' gradients sums."""
    generator = torch.Generator().manual_seed(0)
    rows = (260,) if packed else (2, 130)
    q = torch.randn(*rows, 2, 16, generator=generator).to(device)
    cu = torch.tensor([0, 130, 130, 260], device=device) if packed else None
    gates, options = (None, None, None), Options(2, 16, 0, 0.25, True)
    whole = run(q, gates, cu, options)[1]
    monkeypatch.setattr(configs, "query_chunks", lambda rows, tokens: 2)
    chunked = run(q, gates, cu, options)[1]
    for one, other in zip(chunked[:4], whole[:4], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("block", "count", "channels", "dtype"),
    [
        pytest.param(128, 2, 128, torch.float32, marks=LONG),
        pytest.param(16, 64, 16, torch.bfloat16),
        pytest.param(96, 3, 256, torch.bfloat16, marks=LONG),
    ],
)
def test_the_ends_of_the_sizes(block, count, channels, dtype, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v, u, do = (torch.randn(1, 300, 2, channels, generator=generator).to(device, dtype) for _ in range(5))
    options = Options(count, block, 0, channels**-0.5, True)
    results = launch.forward(q, k, v, u, (None, None, None), None, options)
    gradients = launch.backward(do, q, k, v, u, (None, None, None), *results[1:], None, options)
    leaves = [x.double().requires_grad_() for x in (q, k, v, u)]
    o, _ = reference.block_sparse_attn(*leaves, None, None, None, count, block, block_indices=results.block_indices)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip((results.o, *gradients[:4]), (o, *torch.autograd.grad(o, leaves, do.double())), strict=True):
        assert (one.double() - other).norm() <= limit * other.norm()


def test_a_block_that_fits_no_tile_is_refused():
    x = torch.empty(1, 600, 1, 256, device="meta")
    with pytest.raises(ValueError, match="fit no tile"):
        selected.make_inputs(x, x, x, torch.empty(1, 600, 1, 2, dtype=torch.int32, device="meta"), None, 257, 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cpu"])
def test_sums_beyond_fp16_before_layer_norm(backend):
    """A branch's output, a sum over keys without a softmax, is above 65,504 here; o is not."""
    if backend == "cpu" and torch.cuda.is_available():
        pytest.skip("the backend of CPU tensors")
    case = "T=33,D=16,Dv=8,count=2,size=300,window=20"
    report = verify(
        "bsa", partial(block_sparse_attn, backend=backend), configs=[case], dtypes=["fp16"], fill="one-signed"
    )
    assert report.passed, report.failures
