"""The criterion itself: it passes rounding and catches what is wrong."""

import math

import pytest
import torch
from battery import first_quick

from tilewise.ops.flash.reference import flash_attention
from tilewise.verify import compare_tensors, verify
from tilewise.verify.compare import UNFIT, Limits, compare, limits_from_eager, rounding_floor

TRUTH = torch.randn(40, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EAGER = TRUTH.bfloat16()


def judge(actual, truth=TRUTH, eager=EAGER, **options):
    return compare("o", actual, truth, eager.dtype, limits_from_eager(truth, eager, **options), "TD")


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
    assert "worst at [7, 3]" in comparison.failure.problem


def test_an_error_spread_over_all_elements_fails_by_its_mean_square():
    # Never more than twice eager's greatest error, but everywhere.
    actual = (TRUTH + (EAGER.double() - TRUTH).abs().max() * 0.9).float()
    comparison = judge(actual, eager=EAGER.float())
    assert not comparison.passed
    assert "root mean square" in comparison.failure.problem


def test_numbers_that_are_all_alike_may_all_be_rounded_by_as_much():
    truth = torch.full((40, 30), 1.0, dtype=torch.float64)
    actual = (truth * (1 + torch.finfo(torch.bfloat16).eps * 0.9)).float()
    options = {"truth": truth, "eager": truth.bfloat16()}
    assert judge(actual.bfloat16(), alike=True, **options).passed
    assert not judge(actual.bfloat16(), **options).passed
    assert not judge((actual * 1.01).bfloat16(), alike=True, **options).passed


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros_like(EAGER), EAGER * 1.02, EAGER.roll(1, 0), -EAGER],
    ids=["zeros", "factor", "shifted", "negated"],
)
def test_wrong_tensors_fail(wrong):
    assert not judge(wrong).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_fails(value):
    actual = EAGER.clone()
    actual[1, 2] = value
    comparison = judge(actual)
    assert not comparison.passed
    assert "at [1, 2]" in comparison.failure.problem


def test_minus_infinity_must_stand_where_the_truth_has_it():
    truth, actual = TRUTH.clone(), EAGER.clone()
    truth[0, 0] = actual[0, 0] = -math.inf
    assert judge(actual, truth, actual).passed
    actual = actual.clone()
    actual[0, 0] = 0.0
    assert not judge(actual, truth).passed


def test_a_wrong_shape_fails():
    assert "shape [30, 40], expected [40, 30]" in judge(EAGER.T).failure.problem


def test_exact_zeros_stay_exact():
    zeros = torch.zeros_like(TRUTH)
    assert judge(torch.zeros_like(EAGER), zeros, torch.zeros_like(EAGER)).passed
    assert not judge(torch.full_like(EAGER, 1e-6), zeros, torch.zeros_like(EAGER)).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_wrong_dtype_fails(dtype):
    comparison = judge(EAGER.to(dtype))
    assert not comparison.passed
    assert f"dtype {dtype}, expected torch.bfloat16" in comparison.failure.problem


def judged(function, case="small", dtype="bf16"):
    """The failed tensors of flash's reference, changed, by name."""
    (result,) = verify("flash", function, configs=[case], dtypes=[dtype]).results
    return {comparison.name: comparison.failure for comparison in result.comparisons if comparison.failure}


def test_an_lse_in_16_bits_fails():
    def narrow(q, k, v, return_lse):
        o, lse = flash_attention(q, k, v)
        return o, lse.bfloat16()

    assert "dtype torch.bfloat16, expected torch.float32" in judged(narrow)["lse"].problem


def test_the_lse_is_held_to_fp32_in_every_dtype():
    """An LSE rounded to bf16 is off by 1e-3 and more: eager torch in bf16 would allow it, the contract does not."""

    def rounded(q, k, v, return_lse):
        o, lse = flash_attention(q, k, v)
        return o, lse.bfloat16().float()

    assert list(judged(rounded)) == ["lse"]


WRONG = {
    "no-scale": lambda q, k, v: flash_attention(q, k, v, causal=True, scale=1.0),
    "not-causal": lambda q, k, v: flash_attention(q, k, v),
    "mask-off-by-one": lambda q, k, v: flash_attention(q, k, v, window_size=(-1, 1)),
    "one-key-missing": lambda q, k, v: flash_attention(q, k, v, causal=True, window_size=(126, 0)),
    "lse-base-2": lambda q, k, v: (lambda o, lse: (o, lse * 1.4426950408889634))(
        *flash_attention(q, k, v, causal=True)
    ),
    "no-gradient-of-k": lambda q, k, v: flash_attention(q, k.detach() + 0 * k, v, causal=True),
}


@pytest.mark.parametrize("dtype", first_quick(["bf16", "fp32", "fp16"]))
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_attention_is_caught(wrong, dtype):
    assert judged(lambda q, k, v, causal, return_lse: wrong(q, k, v), "medium", dtype)


def test_a_reference_that_cannot_tell_is_an_error():
    """Limits wider than the truth pass everything: that is a failure of the case, said as such."""
    comparison = compare("o", EAGER, TRUTH, EAGER.dtype, Limits(largest=10.0, rms=5.0), "TD")
    assert comparison.failure.status == UNFIT


def test_what_the_dtype_cannot_hold_is_an_unfit_case():
    truth = TRUTH * 1e6
    assert compare("o", truth.half(), truth, torch.float16, Limits(1.0, 1.0), "TD").failure.status == UNFIT


def test_a_failure_tells_ranges_counts_and_the_worst_element():
    actual = EAGER.clone()
    actual[7, 3] += 1.0
    failure = judge(actual).failure
    assert failure.worst == (7, 3)
    assert failure.worst_actual == actual[7, 3].item()
    assert failure.worst_expected == TRUTH[7, 3].item()
    assert failure.elements == TRUTH.numel()
    assert failure.expected_range == (TRUTH.min().item(), TRUTH.max().item())
    assert failure.exceeding == 1
    assert (failure.rtol, failure.atol) == (0.0, judge(actual).allowed)
    assert any("row 7" in sentence for sentence in failure.diagnosis)
    assert failure.heat.cells[0][0] > 1
    assert failure.heat.worst == (0, 0)


def test_compare_tensors_is_allclose_with_statistics(capsys):
    a = TRUTH.float()
    assert compare_tensors(a, a + 5e-5, "close").passed
    assert "close" in capsys.readouterr().out
    comparison = compare_tensors(a, a * 1.5, "far", verbose=False)
    assert not comparison.passed
    assert "0.6667" in comparison.failure.diagnosis[0]
    assert capsys.readouterr().out == ""
    for rtol, atol in ((1e-6, 1e-6), (1e-2, 0.0), (0.0, 1e-2)):
        other = a * 1.005
        assert compare_tensors(a, other, rtol=rtol, atol=atol, verbose=False).passed == torch.allclose(
            a, other, rtol=rtol, atol=atol
        )


def test_the_floor_knows_three_tf32_products_and_plain_tf32_is_far_above_it():
    eps = torch.finfo(torch.float32).eps
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert rounding_floor(torch.float32, cpu) == 9 * eps
    assert rounding_floor(torch.float32, cuda) == 41 * eps
    assert rounding_floor(torch.bfloat16, cuda) == rounding_floor(torch.bfloat16, cpu)
    assert rounding_floor(torch.float32, cuda) < 2**-11 / 50
