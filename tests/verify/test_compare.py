"""The criterion itself: it passes rounding and catches what is wrong."""

import math

import pytest
import torch

from tilewise import registry
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.cases.flash import CASES
from tilewise.verify.compare import compare, rounding_floor
from tilewise.verify.run import DTYPES, verify_case

TRUTH = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EAGER = TRUTH.bfloat16()


def judge(actual, truth=TRUTH, eager=EAGER, **options):
    return compare("o", actual, truth, eager, **options)


def test_rounding_passes_with_its_statistics():
    comparison = judge(EAGER)
    diff = (EAGER.double() - TRUTH).abs()
    assert comparison.passed
    assert comparison.max_diff == diff.max().item()
    assert comparison.mean_diff == pytest.approx(diff.mean().item())
    assert comparison.std_diff == pytest.approx(diff.std(correction=0).item())


def test_one_wrong_element_fails_and_is_named():
    actual = EAGER.clone()
    actual[7, 3] += 1.0
    comparison = judge(actual)
    assert not comparison.passed
    assert "worst at [7, 3]" in comparison.problem


def test_an_error_spread_over_all_elements_fails_by_its_mean_square():
    # Never more than twice eager's greatest error, but everywhere.
    actual = (TRUTH + (EAGER.double() - TRUTH).abs().max() * 0.9).float()
    comparison = compare("o", actual, TRUTH, EAGER.float())
    assert not comparison.passed
    assert "root mean square" in comparison.problem


@pytest.mark.parametrize("wrong", [torch.zeros_like(EAGER), EAGER * 1.02, EAGER.roll(1, 0), -EAGER], ids=["zeros", "factor", "shifted", "negated"])
def test_wrong_tensors_fail(wrong):
    assert not judge(wrong).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(value):
    actual = EAGER.clone()
    actual[1, 2] = value
    comparison = judge(actual)
    assert not comparison.passed
    assert "at [1, 2]" in comparison.problem


def test_minus_infinity_must_stand_where_the_truth_has_it():
    truth, actual = TRUTH.clone(), EAGER.clone()
    truth[0, 0] = actual[0, 0] = -math.inf
    assert judge(actual, truth, actual).passed
    actual = actual.clone()
    actual[0, 0] = 0.0
    assert not judge(actual, truth).passed


def test_a_wrong_shape_fails():
    assert "shape [30, 40], expected [40, 30]" in judge(EAGER.T).problem


def test_exact_zeros_stay_exact():
    zeros = torch.zeros_like(TRUTH)
    assert judge(torch.zeros_like(EAGER), zeros, torch.zeros_like(EAGER)).passed
    assert not judge(torch.full_like(EAGER, 1e-6), zeros, torch.zeros_like(EAGER)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wrong_dtype_fails(dtype):
    comparison = judge(EAGER.to(dtype))
    assert not comparison.passed
    assert f"dtype {dtype}, expected torch.bfloat16" in comparison.problem


def test_an_lse_in_16_bits_fails():
    case = next(case for case in CASES if case.name == "small")

    def narrow(q, k, v):
        o, lse = flash_attention(q, k, v)
        return o, lse.bfloat16()

    comparisons = verify_case(registry.find("flash"), case, narrow, DTYPES["bf16"], torch.device("cpu"))
    assert "dtype torch.bfloat16, expected torch.float32" in comparisons[1].problem


def test_the_lse_is_held_to_fp32_in_every_dtype():
    """An LSE rounded to bf16 is off by 1e-3 and more: eager torch in bf16 would allow it, the contract does not."""
    case = next(case for case in CASES if case.name == "small")

    def rounded(q, k, v):
        o, lse = flash_attention(q, k, v)
        return o, lse.bfloat16().float()

    comparisons = verify_case(registry.find("flash"), case, rounded, DTYPES["bf16"], torch.device("cpu"))
    assert [comparison.name for comparison in comparisons if not comparison.passed] == ["lse"]


WRONG = {
    "no-scale": lambda q, k, v: flash_attention(q, k, v, causal=True, scale=1.0),
    "not-causal": lambda q, k, v: flash_attention(q, k, v),
    "mask-off-by-one": lambda q, k, v: flash_attention(q, k, v, window_size=(-1, 1)),
    "one-key-missing": lambda q, k, v: flash_attention(q, k, v, causal=True, window_size=(126, 0)),
    "lse-base-2": lambda q, k, v: (lambda o, lse: (o, lse * 1.4426950408889634))(*flash_attention(q, k, v, causal=True)),
    "no-gradient-of-k": lambda q, k, v: flash_attention(q, k.detach() + 0 * k, v, causal=True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_attention_is_caught(wrong, dtype):
    case = next(case for case in CASES if case.name == "medium")
    comparisons = verify_case(registry.find("flash"), case, lambda q, k, v, causal: wrong(q, k, v), DTYPES[dtype], torch.device("cpu"))
    assert not all(comparison.passed for comparison in comparisons)


def test_the_floor_knows_three_tf32_products_and_plain_tf32_is_far_above_it():
    eps = torch.finfo(torch.float32).eps
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert rounding_floor(torch.float32, cpu) == 5 * eps
    assert rounding_floor(torch.float32, cuda) == 37 * eps
    assert rounding_floor(torch.bfloat16, cuda) == rounding_floor(torch.bfloat16, cpu)
    assert rounding_floor(torch.float32, cuda) < 2**-11 / 50
