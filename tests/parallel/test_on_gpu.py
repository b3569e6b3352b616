"""Over two processes that share a GPU: the kernels' side of calls over ranks. Gloo copies through the host, so that
nothing here says how fast they are.
"""

import pytest
import torch
from parallel import flash_ranks, gpu_ranks, nsa_ranks
from processes import processes

from tilewise.ops.nsa import reference
from tilewise.verify.compare import compare_choices, rounding_floor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a GPU"),
]
# Tiles of Hopper's own kernels, and of the portable ones.
SIZES = (2, 8, 2, 64, 64), (2, 4, 1, 128, 128), (1, 4, 2, 40, 24)
DENSE, PACKED = [0, 1111], [0, 500, 500, 503, 1111]
BACKEND = "triton"


def rounded(module, monkeypatch):
    """Its inputs in fp64 are those in 16 bits."""
    own = module.inputs

    def inputs(*given, **options):
        return gpu_ranks.each(
            own(*given, **options), lambda x: x.bfloat16().double() if x.dtype == torch.float64 else x
        )

    monkeypatch.setattr(module, "inputs", inputs)


def named(found):
    return found if isinstance(found, dict) else dict(enumerate(found))


def compare(truth, function, *given, **plan_options):
    """Two processes are as near to the truth as one is, whose kernels are held to it elsewhere."""
    (one,) = processes().run(function, 1, *given, {})
    for found in processes().run(function, 2, *given, plan_options):
        for name, exact in named(truth).items():
            x, y = named(found)[name], named(one)[name]
            seen = exact.isfinite()
            assert torch.equal(x.isfinite(), seen)
            error, of_one = (abs(i.double() - exact)[seen].max() for i in (x, y))
            floor = rounding_floor(torch.bfloat16, x.device) * abs(exact[seen]).max()
            assert error <= 2 * of_one + floor, (name, error, of_one)


@pytest.mark.parametrize("offsets", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_flash_attention(method, sizes, offsets, monkeypatch):
    rounded(flash_ranks, monkeypatch)
    for options in ({"causal": True}, {"causal": True, "window_size": (100, 0), "softcap": 5.0}, {}):
        truth = flash_ranks.whole(sizes, offsets, torch.float64, options, True, "reference")
        given = sizes, offsets, torch.bfloat16, options, True, BACKEND
        compare(truth, gpu_ranks.flash, *given, method=method)


# In 16 bits a choice may differ where scores are close, and with it the output: choices are judged by themselves.
WITHOUT_CHOICE = {"gates": ("g_cmp", "g_swa")}


@pytest.mark.parametrize("offsets", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "options",
    [WITHOUT_CHOICE, WITHOUT_CHOICE | {"learned": True}, {"given": torch.int32}],
    ids=["means", "learned", "given"],
)
def test_native_sparse_attention(options, sizes, offsets, monkeypatch):
    rounded(nsa_ranks, monkeypatch)
    truth = nsa_ranks.whole(sizes, offsets, torch.float64, options, "reference")
    compare(truth, gpu_ranks.nsa, sizes, offsets, torch.bfloat16, options, BACKEND)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_choices(sizes):
    given, _ = nsa_ranks.inputs(sizes[0], DENSE, *sizes[1:], torch.bfloat16)
    numbers = {name: number for name, number in nsa_ranks.SIZES.items() if name not in ("window_size", "block_count")}
    windows = numbers["compress_size"], numbers["compress_stride"]

    def scores(dtype):
        q, k = given["q"].to(dtype), reference.compress_mean(given["k"].to(dtype), *windows)
        return reference.choice_scores(q, k, **numbers, compute_dtype=dtype)

    truth, eager = scores(torch.float64), scores(torch.bfloat16)
    for found in processes().run(gpu_ranks.nsa, 2, sizes, DENSE, torch.bfloat16, {}, BACKEND, {}):
        assert compare_choices(found["chosen"], truth, eager.double()) == ""
