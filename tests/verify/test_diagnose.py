"""Each mistake, planted on a correct tensor rounded to bf16, is named for what it is; rounding and noise are not taken
for one.
"""

import math

import pytest
import torch

from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.diagnose import diagnose

B, T, H, D = 3, 200, 4, 16


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TRUTH = random(B, T, H, D)
OTHER = random(B, T, H, D, seed=1)
ALLOWED = 2 * (TRUTH.bfloat16().double() - TRUTH).abs().max().item()
# As an LSE: values that vary little, and rows that see nothing.
LSE = 5 + 0.3 * random(B, H, T, seed=2)
LSE[:, :, :2] = -torch.inf


def say(actual, expected=TRUTH, allowed=ALLOWED, axes="BTHD", **options):
    return diagnose(actual.to(torch.bfloat16), expected, allowed, axes, **options)


def planted(change, truth=TRUTH):
    actual = truth.clone()
    replacement = change(actual)
    return actual if replacement is None else replacement


def put(value, *place):
    def change(x):
        x[place] = value

    return change


def add(value, *place):
    def change(x):
        x[place] += value

    return change


def take(source, *place):
    def change(x):
        x[place] = TRUTH[source]

    return change


ALL = slice(None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_correct_tensor_gives_nothing(dtype):
    assert diagnose(TRUTH.to(dtype), TRUTH, ALLOWED, "BTHD", {"dv": OTHER}) == []
    assert diagnose(LSE.to(dtype), LSE, 0.02, "BHT") == []


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (torch.zeros_like, ["all zero"]),
        (lambda x: -x, ["off by a constant factor: -1, that is the sign"]),
        (lambda x: x * math.log(2), ["off by a constant factor: 0.6931, that is ln 2 (base 2 in place of e)"]),
        (lambda x: x / math.log(2), ["off by a constant factor: 1.443, that is 1/ln 2 (base 2 in place of e)"]),
        (lambda x: x * 2, ["off by a constant factor: 2, that is 2"]),
        (lambda x: x / 2, ["off by a constant factor: 0.5, that is 1/2"]),
        (lambda x: x * -3, ["off by a constant factor: -3, that is the sign and 3"]),
        (lambda x: x * 4, ["off by a constant factor: 4, that is sqrt(16) of the last axis or 4"]),
        (lambda x: x / 4, ["off by a constant factor: 0.25, that is 1/sqrt(16) of the last axis or 1/4"]),
        (lambda x: x * 1.7, ["off by a constant factor: 1.7"]),
        (lambda x: x + 0.7, ["off by a constant offset: +0.7"]),
        (lambda x: OTHER, ["holds what dv should hold"]),
        (lambda x: x.roll(1, 1), ["shifted by +1 along T: row i holds what row i-1 should hold"]),
        (lambda x: x.roll(-1, 1), ["shifted by -1 along T: row i holds what row i+1 should hold"]),
        (lambda x: x.roll(1, 2), ["shifted by +1 along H: head i holds what head i-1 should hold"]),
        (lambda x: x.roll(-1, 0), ["shifted by -1 along B: batch entry i holds what batch entry i+1 should hold"]),
        (lambda x: x.transpose(1, 2).reshape(x.shape), ["transposed: axes T and H are swapped in the order of memory"]),
        (lambda x: x.flip(2), [", ".join(f"head {i} holds head {3 - i}'s values" for i in range(4))]),
        (take((ALL, ALL, 0), ALL, ALL, 1), ["head 1 holds head 0's values", "only in head 1 of 4"]),
        (take(2, 0), ["batch entry 0 holds batch entry 2's values", "only in batch entry 0 of 3"]),
    ],
)
def test_a_mistake_that_explains_the_whole(change, sentences):
    found = say(planted(change), others={"lse": LSE, "dv": OTHER})
    assert [_rounded(s) for s in found] == sentences


def _rounded(sentence):
    """A fitted number is 4 digits of what was planted, give or take rounding to bf16: 3 digits of it."""
    head, colon, number = sentence.partition(": ")
    if "constant" not in head:
        return sentence
    number, comma, name = number.partition(",")
    known = (-1, math.log(2), 1 / math.log(2), 2, 0.5, -3, 4, 0.25, 1.7, 0.7)
    value = min(known, key=lambda x: abs(x - float(number)))
    assert float(number) == pytest.approx(value, rel=2e-3)
    return f"{head}{colon}{value:{'+' if 'offset' in head else ''}.4g}{comma}{name}"


def test_axes_of_the_same_size():
    truth = random(2, 24, 24)
    assert say(truth.transpose(1, 2), truth, axes="BTD") == ["transposed: axes T and D are swapped"]


def test_many_heads_are_cut_short_and_too_many_are_not_searched():
    truth = random(40, 8, 4)
    found = say(truth.flip(1), truth, axes="THD")
    assert found[0].endswith("head 3 holds head 4's values and 4 more")
    truth = random(40, 65, 4)
    assert say(truth.flip(1), truth, axes="THD")[0].startswith(("only", "spread"))


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (add(1, 1), ["only in batch entry 1 of 3"]),
        (add(1, ALL, ALL, [0, 3]), ["only in heads 0, 3 of 4"]),
        (add(1, ALL, ALL, ALL, slice(8, 16)), ["only from channel 8 on, of 16"]),
        (add(1, ALL, ALL, ALL, slice(4, 8)), ["only in channels 4 to 7 of 16"]),
        (add(1, ALL, 0), ["only in the first row"]),
        (add(1, ALL, -1), ["only in the last row"]),
        (add(1, ALL, 7), ["only in row 7 of 200"]),
        (put(0, ALL, slice(128, 200)), ["only in the last tile of 128: rows 128 to 199 of 200"]),
        (put(0, ALL, slice(192, 200)), ["only in the last tile of 64: rows 192 to 199 of 200"]),
        (put(0, ALL, slice(150, 160)), ["only in the last tile of 128: rows 150 to 159 of 200"]),
        (put(0, ALL, slice(16, 200)), ["only from row 16 on, of 200"]),
        (put(0, ALL, slice(32, 64)), ["only in rows 32 to 63 of 200"]),
        (put(0, ALL, slice(3, 200, 4)), ["only in every 4th row, from 3 to 199 of 200"]),
        (put(0, ALL, [1, 2, 60]), ["only in rows 1, 2, 60 of 200"]),
        (put(0, ALL, [*range(20), *range(40, 60, 3)]), ["only in 27 of 200 rows, within rows 0 to 58"]),
        (
            add(1, 2, 7, 1, 5),
            ["only in row 7 of 200", "only in channel 5 of 16", "only in head 1 of 4", "only in batch entry 2 of 3"],
        ),
        (
            add(1, 2, slice(128, 200)),
            ["only in batch entry 2 of 3", "only in the last tile of 128: rows 128 to 199 of 200"],
        ),
    ],
)
def test_where_only_a_part_is_bad(change, sentences):
    assert say(planted(change)) == sentences


def test_the_last_tile_of_a_multiple_is_the_last_full_one():
    truth = TRUTH[:, :128]
    assert say(planted(put(0, ALL, slice(64, 128)), truth), truth) == [
        "only in the last tile of 64: rows 64 to 127 of 128"
    ]


def test_other_letters_stand_for_themselves_and_missing_ones_do_no_harm():
    actual = planted(add(1, ALL, ALL, ALL, 3))
    assert say(actual, axes="BTHV") == ["only in V 3 of 16"]
    assert say(actual, axes="BT") == ["only in ? 3 of 16"]


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (put(math.nan), [f"NaN in {TRUTH.numel()} of {TRUTH.numel()} elements, where the truth has none"]),
        (
            put(math.nan, ALL, ALL, 2),
            ["NaN in 9600 of 38400 elements, where the truth has none", "only in head 2 of 4"],
        ),
        (put(-math.inf, ALL, 0), ["Inf in 192 of 38400 elements, where the truth has none", "only in the first row"]),
    ],
)
def test_what_is_not_finite(change, sentences):
    assert say(planted(change)) == sentences


def test_nan_and_inf_are_said_apart_and_hide_no_factor():
    actual = 2 * TRUTH
    actual[0, 0], actual[0, 1] = math.nan, math.inf
    found = say(actual)
    assert found[0].endswith("that is 2")
    assert [s.split(",")[0] for s in found[1:]] == ["NaN in 64 of 38400 elements", "Inf in 64 of 38400 elements"]


@pytest.mark.parametrize(
    ("actual", "sentences"),
    [
        (LSE + math.log(2), ["off by a constant offset: +0.6931"]),
        (LSE / math.log(2), ["off by a constant factor: 1.443, that is 1/ln 2 (base 2 in place of e)"]),
        (LSE.roll(1, 2), ["shifted by +1 along T: row i holds what row i-1 should hold"]),
        (
            LSE.nan_to_num(neginf=-1e30),
            ["finite in 24 of 2400 elements, where the truth is not", "only in rows 0 to 1 of 200"],
        ),
        (torch.zeros_like(LSE), ["all zero", "finite in 24 of 2400 elements, where the truth is not"]),
    ],
)
def test_an_lse_with_rows_that_see_nothing(actual, sentences):
    found = diagnose(actual.float(), LSE, 1e-4, "BHT")
    assert [s for s in found if "Inf in" not in s][: len(sentences)] == sentences


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [0.5, 10])
def test_noise_is_only_spread(seed, size):
    actual = TRUTH + size * ALLOWED * random(*TRUTH.shape, seed=seed + 10)
    (sentence,) = diagnose(actual, TRUTH, ALLOWED, "BTHD", {"dv": OTHER})
    assert sentence.startswith("spread over all elements: ")
    assert sentence.endswith("the error looks like noise, its mean is about 0")


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 2, 1), (1, 3, 1, 1), (1, 1, 1, 8), (1, 2, 2, 4), (2, 2, 2, 2)])
def test_noise_on_few_elements_is_not_explained(shape):
    letters = "BTHD"
    for seed in range(200):
        found = diagnose(
            random(*shape, seed=seed),
            random(*shape, seed=seed + 1000),
            1e-3,
            letters,
            {"dv": random(*shape, seed=seed + 2000)},
        )
        assert [s for s in found if not s.startswith(("only", "spread"))] == []


@pytest.mark.parametrize("seed", range(5))
def test_slices_left_out_by_chance_are_not_told(seed):
    actual = TRUTH.clone()
    actual.view(-1)[torch.randperm(TRUTH.numel(), generator=torch.Generator().manual_seed(seed))[:100]] += random(
        100, seed=seed
    ).sign()
    assert [s.split(";")[0] for s in say(actual)] == ["spread over all elements: 100 of 38400 (0.3%) are bad"]


def test_what_is_about_zero_has_no_factor():
    assert all(s.startswith("spread") for s in say(1e-2 * ALLOWED * OTHER))


def test_a_mistake_is_not_said_of_all_where_one_row_differs():
    for actual in (2 * TRUTH, TRUTH.roll(1, 1)):
        actual[0, 50] = OTHER[0, 0]
        assert [s.split(":")[0] for s in say(actual)] == ["spread over all elements"]


def test_a_truth_of_zeros_has_its_heads_too():
    zeros = torch.zeros_like(TRUTH)
    assert say(planted(add(1, ALL, ALL, 1), zeros), zeros, 0.0) == ["only in head 1 of 4"]


def test_an_error_that_leans_to_one_side():
    (sentence,) = say(TRUTH + 10 * ALLOWED * random(*TRUTH.shape, seed=9).abs())
    assert "the error leans to one side, its mean is +" in sentence


def test_truth_that_a_change_leaves_alone_is_not_taken_for_it():
    truth = 1 + 1e-6 * TRUTH
    actual = truth + 0.1 * random(*truth.shape, seed=3)
    assert all(s.startswith("spread") for s in say(actual, truth, 1e-3, others={"dv": truth.flip(0)}))


def test_a_great_row_alone_does_not_make_a_factor():
    truth = TRUTH.clamp(-0.4, 0.4)
    truth[:, 0] = 100 * TRUTH[:, 0].sign()
    actual = truth.clone()
    actual[:, 0] /= 2
    assert diagnose(actual, truth, 1e-3, "BTHD") == ["only in the first row"]


def test_attention_that_misses_its_tail():
    q, k, v = (random(2, 200, 4, 32, seed=seed) for seed in (4, 5, 6))
    truth, lse = flash_attention(q, k, v, causal=True)
    allowed = 2 * (truth.bfloat16().double() - truth).abs().max().item()
    assert say(truth, truth, allowed) == []
    # The last queries are never written; then the last keys are never read, which only the last rows see.
    actual = truth.clone()
    actual[:, 192:] = 0
    assert say(actual, truth, allowed) == ["only in the last tile of 64: rows 192 to 199 of 200"]
    short, short_lse = flash_attention(q[:, 192:], k[:, :192], v[:, :192], causal=False)
    actual[:, 192:] = short
    assert say(actual, truth, allowed) == ["only in the last tile of 64: rows 192 to 199 of 200"]
    actual = lse.clone()
    actual[:, :, 192:] = short_lse
    assert diagnose(actual.float(), lse, 1e-5, "BHT") == ["only in the last tile of 64: rows 192 to 199 of 200"]


def test_a_factor_says_nothing_of_rows_whose_truth_is_zero():
    truth = TRUTH.clone()
    truth[:, 0] = 0
    assert len(say(2 * truth, truth)) == 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), (9,), (3, 0, 2), (1, 1, 1, 1), (2, 3), (1, 2, 1, 7)])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("allowed", [0.0, 0.5, math.inf, math.nan])
def test_small_and_odd_tensors_raise_nothing(shape, value, allowed):
    for wanted in (0.0, 1.0, -math.inf, math.nan):
        actual, truth = torch.full(shape, value), torch.full(shape, wanted, dtype=torch.float64)
        same = (
            value == wanted
            or (math.isnan(value) and math.isnan(wanted))
            or (math.isfinite(value - wanted) and abs(value - wanted) <= allowed)
        )
        found = diagnose(actual, truth, allowed, "BTHD"[: len(shape)], {"dv": truth, "dk": torch.ones(3)})
        assert bool(found) == (not same and truth.numel() > 0)


def test_another_shape_is_said():
    assert say(TRUTH[:, :5]) == ["has shape [3, 5, 4, 16] in place of [3, 200, 4, 16]"]


def test_inputs_stay_as_they_are():
    actual = (2 * TRUTH).requires_grad_()
    before = actual.detach().clone()
    assert diagnose(actual, TRUTH, ALLOWED, "BTHD")
    assert torch.equal(actual.detach(), before)
