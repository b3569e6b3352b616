"""The worked examples: what is right passes everywhere, what is wrong fails with the right words."""

import importlib.util
from pathlib import Path

import pytest

from tilewise.verify import verify
from tilewise.verify.text import verdict_lines

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FLASH = load("flash_implementations")


def diagnoses(report, case, tensor):
    """What verify says of one tensor of one case."""
    (result,) = (result for result in report.results if result.check.case == case)
    (comparison,) = (comparison for comparison in result.comparisons if comparison.name == tensor)
    return comparison.failure.diagnosis


@pytest.mark.nightly
def test_the_correct_flash_passes_every_case_in_every_dtype():
    report = verify("flash", FLASH.correct)
    assert report.passed, [result.check.command() for result in report.failures]
    assert len(report.results) > 100


def test_torch_s_own_attention_is_judged_without_its_lse():
    report = verify("flash", load("torch_sdpa").sdpa, configs=["small", "block+1", "gqa-3"], dtypes=["fp32", "fp16"])
    assert report.passed
    for result in report.results:
        assert [finding.message for finding in result.findings] == ["lse: not returned, not judged"]
        assert [comparison.name for comparison in result.comparisons] == ["o", "dq", "dk", "dv"]


def test_a_missing_rescale_lies_in_the_later_tiles():
    report = verify("flash", FLASH.missing_rescale, configs=["small", "medium"], dtypes=["bf16"])
    assert [result.passed for result in report.results] == [True, False]
    assert any("only in the last tile of 64" in sentence for sentence in diagnoses(report, "medium", "o"))


def test_an_unmasked_tail_adds_to_the_sum():
    report = verify("flash", FLASH.unmasked_tail, configs=["small", "T=128", "block+1", "odd-lengths"], dtypes=["fp16"])
    assert [result.passed for result in report.results] == [True, True, False, False]
    assert any("leans to one side, its mean is +" in sentence for sentence in diagnoses(report, "block+1", "lse"))
    assert any("a length is not a multiple of 64 in all 2 cases that failed" in line for line in verdict_lines(report))


def test_swapped_gradients_are_named():
    report = verify("flash", FLASH.swapped_gradients, configs=["small", "block+1"], dtypes=["fp32"])
    assert diagnoses(report, "block+1", "dk")[0] == "holds what dv should hold"
    assert diagnoses(report, "block+1", "dv")[0] == "holds what dk should hold"


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "passes"), [("broken", False), ("fixed", True)])
def test_the_triton_kernel_of_the_docs(name, passes):
    words = ["small", "block+1", "odd-lengths", "medium"]
    report = verify("flash", f"{EXAMPLES / 'triton_kernel.py'}:{name}", configs=words, gradients=False)
    assert report.passed == passes
    assert [result.passed for result in report.results if result.check.case == "small"] == [True] * 3
