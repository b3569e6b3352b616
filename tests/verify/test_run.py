"""Every status is found where it should be, and an implementation that is right has none."""

import pytest
import torch

from tilewise import workbench
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify import verify
from tilewise.verify.result import (
    BATCH_ORDER,
    ERROR,
    MEMORY,
    MODIFIED,
    NO_GRADIENT,
    NOT_JUDGED,
    NOTE,
    OVERRUN,
    PADDING,
    STRIDED,
    UNREPEATABLE,
    UNWRITTEN,
    WARNING,
    Check,
    Finding,
    Implementation,
)
from tilewise.verify.run import Runner
from tilewise.verify.text import verdict_lines
from tilewise.workbench.operator import GROWTH


def right(q, k, v, *, return_lse, **options):
    return flash_attention(q, k, v, **options)


def judged(function, case="small", dtype="bf16", **settings):
    (result,) = verify("flash", function, configs=[case], dtypes=[dtype], **settings).results
    return result


def test_what_is_right_passes_every_dtype_and_layout():
    report = verify("flash", right, configs=["small", "strided", "packed", "no-keys", "large-logits"])
    assert report.passed
    assert len(report.results) == 15
    assert not any(result.findings for result in report.results)


@pytest.mark.slow
def test_the_standard_run_of_a_function_measures_memory_and_warns():
    report = verify("flash", right, dtypes=["fp32"])
    assert report.passed
    (growth,) = [result for result in report.results if result.check.case == GROWTH]
    (finding,) = growth.findings
    assert finding.status == MEMORY
    assert finding.severity == WARNING


@pytest.mark.parametrize("squares", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_memory_of_interpreted_kernels_is_that_around_them(squares, monkeypatch):
    """It is measured without running them: what the code around them allocates is found all the same."""
    launched = []
    operator = workbench.find("flash")

    def function(q, k, v, **options):
        launched.append(q.shape[1])
        kept = torch.zeros(squares, q.shape[1], q.shape[1])
        o, lse = operator.load("function")(q, k, v, backend="triton", **options)
        return o + kept.sum(), lse

    check = Check("flash", Implementation("triton", "cpu", interpreted=True), GROWTH, "fp32")
    monkeypatch.setattr(
        "triton.runtime.interpreter.interpreter_builder.set_grid_idx", lambda *_: pytest.fail("a kernel ran")
    )
    result = Runner(operator, function).run(check)
    assert launched
    assert result.statuses == ((MEMORY,) if squares else ())


def without_lse(q, k, v, *, return_lse=False, **options):
    return flash_attention(q, k, v, **options)[0]


def takes_no_flag(q, k, v, *, causal=False, scale=None, window_size=(-1, -1), softcap=0.0):
    return without_lse(q, k, v, causal=causal, scale=scale, window_size=window_size, softcap=softcap)


def none_for_lse(q, k, v, **options):
    return without_lse(q, k, v, **options), None


@pytest.mark.parametrize("function", [without_lse, takes_no_flag, none_for_lse])
def test_an_lse_that_is_not_returned_is_not_judged(function):
    configs = ["small", "gqa-3", "strided", "window", "large-logits", "no-keys"]
    report = verify("flash", function, configs=configs)
    assert report.passed
    for result in report.results:
        assert Finding(NOT_JUDGED, "lse: not returned, not judged", NOTE) in result.findings
        if result.check.case == "small":
            assert [c.name for c in result.comparisons] == ["o", "dq", "dk", "dv"]
            assert len(result.findings) == 1
    assert "lse: not returned, not judged" in verdict_lines(report)
    assert "as far as they are judged" in verdict_lines(report)[-1]


def test_gradients_are_judged_without_an_lse():
    def wrong(q, k, v, **options):
        return without_lse(q, k * 1.05, v, **options) + 0 * k.sum()

    assert "wrong values" in judged(wrong).statuses


def test_our_own_backends_must_return_the_lse():
    check = Check("flash", Implementation("triton", "cpu"), "small", "fp32")
    result = Runner(workbench.find("flash"), without_lse).run(check)
    assert result.statuses == (ERROR,)
    assert "expected 2 tensors (o, lse), got Tensor" in result.findings[0].message


def test_raw_numbers_are_judged_where_they_tell_something():
    report = verify("flash", right, configs=["small", "T=5"], fill="range-raw")
    assert report.passed
    assert any(result.comparisons for result in report.results)
    notes = {finding.message for result in report.results for finding in result.findings}
    assert "dk: unfit in fp16, not judged" in notes

    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return o, lse + 1000

    assert not verify("flash", wrong, configs=["T=5"], fill="range-raw").passed


def test_where_no_output_can_be_judged_nothing_passes():
    """Raw numbers, no LSE: what is left of o tells nothing, whatever it holds."""
    for function in (without_lse, lambda q, k, v, **options: torch.full_like(q, torch.nan) * v.mean()):
        (result,) = verify("flash", function, configs=["T=256,D=64"], dtypes=["fp16"], fill="range-raw").results
        assert "unfit case" in result.statuses


def test_what_is_unfit_is_wrong_where_it_is_not_finite():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return torch.full_like(gradient, torch.nan)

    def wrong(q, k, v, **options):
        return without_lse(Broken.apply(q), k, v, **options)

    result = judged(wrong, case="large-logits")
    assert [c.name for c in result.comparisons if not c.passed] == ["dq"]


def test_an_output_that_is_not_returned_again_is_found():
    calls = []

    def forgets(q, k, v, **options):
        calls.append(1)
        return right(q, k, v, **options) if len(calls) == 1 else without_lse(q, k, v, **options)

    result = judged(forgets)
    assert result.statuses == (UNREPEATABLE,)
    assert "lse is not returned again" in result.findings[-1].message


def test_modified_inputs():
    def wrong(q, k, v, **options):
        result = right(q, k, v, **options)
        k.data.add_(1.0)
        return result

    result = judged(wrong)
    assert result.statuses == (MODIFIED,)
    assert "k is not what it was" in result.findings[0].message


def test_a_write_beside_an_input():
    def wrong(q, k, v, **options):
        q.detach().as_strided((1,), (1,), q.storage_offset() - 1).fill_(1.0)
        return right(q, k, v, **options)

    assert judged(wrong).statuses == (OVERRUN,)


def test_a_write_past_the_end_of_an_output():
    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        stored = torch.empty_like(o)
        stored.copy_(o)
        stored.detach().as_strided((1,), (1,), stored.storage_offset() + stored.numel()).fill_(0.0)
        return o, lse

    result = judged(wrong, gradients=False)
    assert result.statuses == (OVERRUN,)
    assert "0 elements before and 1 after a tensor of shape [1, 64, 4, 32]" in result.findings[0].message


def test_unwritten_elements():
    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        stored = torch.empty_like(o)
        stored[:, :-1] = o[:, :-1]
        return stored, lse

    result = judged(wrong, gradients=False)
    assert UNWRITTEN in result.statuses
    assert PADDING not in result.statuses
    assert "only in the last row" in result.comparisons[0].failure.diagnosis


def test_reading_padding():
    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        beyond = q.detach().as_strided((1,), (1,), q.storage_offset() + q.numel())
        return o + 0.0 * beyond, lse

    result = judged(wrong)
    assert PADDING in result.statuses
    assert UNWRITTEN not in result.statuses


def test_failing_on_strided_inputs_only():
    def wrong(q, k, v, **options):
        flat = q.as_strided(q.shape, torch.empty(q.shape, device="meta").stride())
        return right(flat, k, v, **options)

    assert STRIDED in judged(wrong, "strided").statuses
    assert judged(wrong, "small").passed


def test_runs_that_differ():
    calls = []

    def wrong(q, k, v, **options):
        calls.append(1)
        o, lse = right(q, k, v, **options)
        # Within rounding, so that only the bits tell.
        return o * (1 + 2**-23 * len(calls)), lse

    result = judged(wrong, dtype="fp32")
    assert result.statuses == (UNREPEATABLE,)
    assert "o in" in result.findings[0].message
    assert judged(right, repeat=4).passed


def test_a_result_that_depends_on_the_batch_order():
    calls = []

    def wrong(q, k, v, **options):
        calls.append(1)
        o, lse = right(q, k, v, **options)
        # Right for the batch as it comes, and from the third run on, which is the reversed one, not.
        return o * (1.1 if len(calls) > 2 else 1.0), lse

    assert judged(wrong, "B=3,T=9", dtype="fp32").statuses == (BATCH_ORDER,)


@pytest.mark.parametrize("case", ["B=3,T=9", "lengths=5/0/9/4"])
def test_the_last_bit_may_depend_on_the_batch_order_in_others_code(case):
    def rounded(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return torch.cat([o[:1] * (1 + 2**-23), o[1:]]), lse

    result = judged(rounded, case, dtype="fp32")
    assert result.passed
    (finding,) = result.findings
    assert (finding.status, finding.severity) == (BATCH_ORDER, WARNING)
    assert not judged(right, case, dtype="fp32").findings


def test_no_gradient():
    def wrong(q, k, v, **options):
        return right(q, k.detach(), v, **options)

    result = judged(wrong)
    assert NO_GRADIENT in result.statuses
    assert "no gradient reaches k" in result.findings[0].message
    assert judged(wrong, gradients=False).passed


def test_an_exception_is_a_finding_with_its_place():
    def wrong(q, k, v, **options):
        raise ZeroDivisionError("nothing to see")

    result = judged(wrong)
    assert result.statuses == (ERROR,)
    assert "ZeroDivisionError: nothing to see" in result.findings[0].message
    assert "test_run.py" in result.findings[0].message


def test_what_is_returned_must_be_the_outputs():
    assert (
        "expected 2 tensors (o, lse), got Tensor, Tensor, Tensor"
        in judged(lambda q, k, v, **options: (*right(q, k, v, **options), q)).findings[0].message
    )
    wrong_shape = judged(
        lambda q, k, v, **options: (right(q, k, v, **options)[0].transpose(1, 2), right(q, k, v, **options)[1])
    )
    assert [comparison.failure.status for comparison in wrong_shape.comparisons if comparison.failure] == [
        "wrong shape"
    ]


def test_tolerances_take_the_place_of_eager_torch():
    def rough(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return o * 1.003, lse

    assert not judged(rough, dtype="fp32").passed
    assert not judged(rough, dtype="fp32", rtol=1e-3, gradients=False).passed
    assert judged(rough, dtype="fp32", rtol=1e-2, gradients=False).passed


def test_range_inputs_pass_in_every_dtype():
    assert verify("flash", right, configs=["small", "window", "packed", "gqa-3"], fill="range").passed


@pytest.fixture
def torch_as_it_was():
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("torch_as_it_was")
def test_the_truth_does_not_follow_global_settings():
    torch.set_grad_enabled(False)
    detached = judged(lambda q, k, v, **options: tuple(x.detach() for x in right(q, k, v, **options)), "T=9")
    assert NO_GRADIENT in detached.statuses
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    result = judged(right, "T=9", dtype="fp32", gradients=False)
    assert result.passed, result
    with torch.autocast("cpu", torch.bfloat16):
        assert not judged(
            lambda q, k, v, **options: tuple(x.bfloat16().float() for x in right(q, k, v, **options)),
            "T=9",
            dtype="fp32",
        ).passed


@pytest.mark.slow
def test_one_square_matrix_is_enough_to_be_found():
    class Frugal(torch.autograd.Function):
        """Linear but for one matrix of T² bytes."""

        @staticmethod
        def forward(ctx, q, k, v):
            torch.ones(q.shape[1], k.shape[1], dtype=torch.uint8)
            ctx.save_for_backward(q, k, v)
            return q + k + v, q[..., 0].transpose(1, 2).float().contiguous()

        @staticmethod
        def backward(ctx, do, dlse):
            return do, do, do

    def frugal(q, k, v, **options):
        return Frugal.apply(q, k, v)

    assert [finding.status for finding in judged(frugal, GROWTH).findings] == [MEMORY]
    assert not judged(lambda q, k, v, **options: (q + k + v, q[..., 0].transpose(1, 2).float()), GROWTH).findings


def test_the_same_memory_handed_out_twice_hides_nothing():
    kept = {}

    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        buffer = kept.setdefault("o", torch.zeros_like(o))
        buffer.copy_(o * (1 + 2**-22 * len(kept)))
        kept[len(kept)] = None
        return buffer, lse

    assert judged(wrong, "T=9", dtype="fp32", gradients=False).statuses == (UNREPEATABLE,)


def test_a_backward_that_changes_the_incoming_gradient_or_takes_it_for_contiguous():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o, lse):
            return o.clone(), lse.clone()

        @staticmethod
        def backward(ctx, do, dlse):
            do.mul_(1.0 + 2**-6)
            return do.clone(), dlse

    class Flat(Wrong):
        @staticmethod
        def backward(ctx, do, dlse):
            return do.as_strided(do.shape, torch.empty(do.shape, device="meta").stride()), dlse

    assert judged(lambda q, k, v, **options: Wrong.apply(*right(q, k, v, **options))).statuses == (MODIFIED,)
    assert judged(lambda q, k, v, **options: Flat.apply(*right(q, k, v, **options))).passed
    assert not judged(lambda q, k, v, **options: Flat.apply(*right(q, k, v, **options)), "strided").passed


def test_odd_outputs_are_findings():
    assert "expected an ordinary one on cpu" in judged(lambda q, k, v, **options: (q.to("meta"), q)).findings[0].message
    shapes = iter([0, 1, 2, 3])

    def changing(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return (o, lse) if next(shapes) == 0 else (o[:, 1:], lse)

    assert judged(changing, gradients=False).statuses == (UNREPEATABLE,)


def test_watched_memory_may_be_resized_and_wrapped():
    def resized(q, k, v, **options):
        buffer = torch.empty(0)
        torch.mul(q.detach().float(), 2.0, out=buffer)
        torch.func.grad(lambda x: (x * torch.zeros(3)).sum())(torch.ones(3))
        return right(q, k, v, **options)

    assert judged(resized, "T=9").passed


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("case", ["one-key", "large-logits", "small"])
def test_another_order_of_sums_passes_whatever_the_seed(case, seed):
    def reversed_channels(q, k, v, *, return_lse, **options):
        return flash_attention(q.flip(-1), k.flip(-1), v, **options)

    assert verify("flash", reversed_channels, configs=[case], seed=seed).passed
