"""Errors that lean to one side: a warning, and never one about what merely rounds."""

import json
import math

import jsonschema
import pytest
import torch

from tilewise import workbench
from tilewise.ops.flash.reference import flash_attention
from tilewise.report.verify import render_html
from tilewise.verify import verify
from tilewise.verify.bias import FEWEST, biases, signed_error
from tilewise.verify.compare import WRONG, Comparison, Failure
from tilewise.verify.result import Check, Implementation, Report, Result
from tilewise.verify.text import as_json, verdict_lines

NAMES = [case.name for case in workbench.find("flash").load("suite").cases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_errors_are_counted_in_units_of_the_last_place(dtype):
    place = torch.finfo(dtype).eps
    truth = torch.tensor([1.0, -1.5, 1.75], dtype=torch.float64)
    assert signed_error((truth + place).to(dtype), truth) == 1.0
    assert signed_error((4 * truth - 4 * place).to(dtype), 4 * truth) == -1.0
    # What is small among larger numbers is a sum that cancels: it has their last place.
    assert signed_error(torch.tensor([1.0, 1.0, place], dtype=dtype), torch.tensor([1.0, 1.0, 1e-9])) < 1.0
    assert math.isnan(signed_error(torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=torch.float64)))


def of_cases(*means, failure=None):
    """One result a case, o's mean signed error in each of them given."""
    implementation = Implementation("mine.py:attention", "cpu", external=True)
    return [
        Result(
            Check("flash", implementation, name, "bf16"),
            (Comparison("o", 0.1, 0.1, 0.1, 0.1, 0.1, 0.2, failure, 0.5, mean),),
        )
        for name, mean in zip(NAMES, means, strict=False)
    ]


def test_it_takes_many_cases_that_lean_alike():
    (found,) = biases(of_cases(*(0.25 + 0.01 * (-1) ** i for i in range(FEWEST))))
    assert (found.tensor, found.dtype, found.cases) == ("o", "bf16", FEWEST)
    assert found.mean == pytest.approx(0.25)
    assert found.sigma > 10
    (found,) = biases(of_cases(*(-0.25 + 0.01 * (-1) ** i for i in range(FEWEST))))
    assert found.sigma < -10
    assert not biases(of_cases(*(0.25 + 0.01 * (-1) ** i for i in range(FEWEST - 1))))
    assert not biases(of_cases(*(0.25 * (-1) ** i for i in range(FEWEST))))
    # What failed is reported as that.
    failure = Failure(WRONG, "wrong")
    assert not biases(of_cases(*(0.25 + 0.01 * (-1) ** i for i in range(FEWEST)), failure=failure))


def test_it_is_in_every_report():
    report = Report(of_cases(*(0.25 + 0.01 * (-1) ** i for i in range(FEWEST))))
    sentence = f"o leans to one side in bf16: its error is +0.25 units of the last place in the mean of {FEWEST} cases"
    *_, warning, verdict = verdict_lines(report)
    assert warning.startswith("warning: flash mine.py:attention: ")
    assert sentence in warning
    assert verdict.startswith("PASS: ")
    assert verdict.endswith(", 1 warnings")
    (found,) = json.loads(as_json(report, {}, [], "tilewise verify"))["biases"]
    jsonschema.Draft202012Validator({"$ref": "#/$defs/bias"} | {"$defs": schema()["$defs"]}).validate(found)
    assert sentence in render_html(report, {}, "tilewise verify", [])


def schema():
    from tilewise.verify import text

    with open(text.__file__.replace("text.py", "report.schema.json"), encoding="utf-8") as file:
        return json.load(file)


def right(q, k, v, *, return_lse, **options):
    return flash_attention(q, k, v, **options)


def rounds_up(q, k, v, **options):
    """o is the next larger number in 16 bits: within what is allowed."""
    o, lse = right(q.double(), k.double(), v.double(), **options)
    nearest = o.to(q.dtype)
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return o.to(q.dtype) + torch.where(nearest < o, above - nearest, 0).detach(), lse.float()


def test_what_rounds_up_is_named_and_what_rounds_to_nearest_is_not():
    cases = [f"T={tokens},D=8" for tokens in range(20, 20 + FEWEST)]
    assert not biases(verify("flash", right, configs=cases, dtypes=["bf16"]).results)
    report = verify("flash", rounds_up, configs=cases, dtypes=["bf16"], gradients=False)
    assert report.passed
    assert [(one.tensor, 0.1 < one.mean < 0.5) for one in biases(report.results)] == [("o", True)]
