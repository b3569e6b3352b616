"""Ways of using an implementation besides one forward and one backward; and what it changes of torch's settings."""

import pytest
import torch

from tilewise import workbench
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.nsa.reference import selected_attention
from tilewise.verify import verify
from tilewise.verify.api import run_checks, score
from tilewise.verify.plan import ALL_USES, DTYPES, implementations, plan
from tilewise.verify.result import CHANGES_SETTINGS, NOT_JUDGED, NOTE, SKIPPED, WARNING, Check, Finding, Settings
from tilewise.verify.state import matmul_precision
from tilewise.verify.uses import USES, applies
from tilewise.verify.worker import Job, run_jobs
from tilewise.workbench.flash.cases import SUITE
from tilewise.workbench.flash.planted_uses import USES as BUGS
from tilewise.workbench.operator import UsageError

OPERATORS = workbench.names("suite")


def both(q, k, v, *, return_lse=False, **options):
    """Always the LSE too."""
    return flash_attention(q, k, v, **options)


def right(q, k, v, *, return_lse=False, **options):
    o, lse = flash_attention(q, k, v, **options)
    return (o, lse) if return_lse else o


def found(function, use=ALL_USES, **settings):
    """By use, the statuses of findings, warnings included."""
    report = verify("flash", function, dtypes=["bf16"], uses=[use], **settings)
    return {
        result.check.use: [finding.status for finding in result.findings]
        for result in report.results
        if result.findings
    }


def test_what_is_right_passes_every_use():
    assert found(right) == {}
    assert found(right, configs=["strided", "gqa-3"], gradients=False) == {}


def numbered(q, k, v, **options):
    """Never the same bits twice, within rounding."""
    o, lse = both(q, k, v, **options)
    numbered.calls += 1
    return o, lse + numbered.calls % 7 * 1e-8


def rounds_another_way(q, k, v, **options):
    o, lse = both(q, k, v, **options)
    return o, lse if torch.is_grad_enabled() else lse * (1 + 1e-7)


def requests_nothing(q, k, v, **options):
    return both(q, k, v, **options)[0]


def has_no_default(q, k, v, *, return_lse, **options):
    return right(q, k, v, return_lse=return_lse, **options)


def test_rounding_is_no_failure():
    numbered.calls = 0
    assert found(numbered) == {}
    (result,) = verify("flash", rounds_another_way, dtypes=["bf16"], uses=["no-grad"]).results
    assert result.passed
    assert {finding.severity for finding in result.findings} == {WARNING}
    assert found(requests_nothing) == {}
    assert found(has_no_default, "fewer-outputs") == {}


def needs_a_graph(q, k, v, **options):
    o, lse = both(q, k, v, **options)
    assert o.grad_fn
    return o, lse


def forgets_its_graph(q, k, v, **options):
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.left = 1
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.left -= 1
            assert ctx.left == 0, "the graph is gone"
            return gradient

    o, lse = both(q, k, v, **options)
    return Once.apply(o), lse


def compares_offsets(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    """The host's copy of the offsets is kept by their address, and so is their memory."""
    kept = compares_offsets.kept.setdefault(cu_seqlens_q.data_ptr(), (cu_seqlens_q, cu_seqlens_q.clone()))[1]
    return both(q, k, v, cu_seqlens_q=kept, cu_seqlens_k=cu_seqlens_k, **options)


def steals_the_gradient(q, k, v, **options):
    """All inputs or none: a function that was written for training alone."""
    assert len({x.requires_grad for x in (q, k, v)}) == 1
    return both(q, k, v, **options)


def keeps_values(q, k, v, **options):
    """Values are copied once, and known by their address from then on."""
    kept = keeps_values.kept.setdefault(v.data_ptr(), (v, v.detach().clone()))[1]
    return both(q, k, v - v.detach() + kept, **options)


def has_the_lse_by_default(q, k, v, *, return_lse=True, **options):
    o, lse = both(q, k, v, **options)
    return (o, lse) if return_lse else 2 * o


def hopper(q, k, v, **options):
    """Named as a backend of ours is."""
    return both(q, k, v, **options)


def test_one_sequence_has_other_values_too():
    keeps_values.kept = {}
    assert found(keeps_values, "same-memory", configs=["small"]) == {"same-memory": ["remembers old values"]}
    assert found(both, "two-calls", configs=["small"]) == {}


def test_what_is_the_default_is_declined():
    assert found(has_the_lse_by_default, "fewer-outputs") == {"fewer-outputs": ["wrong without optional outputs"]}


def test_a_function_with_a_backends_name_has_the_whole_battery():
    flash = workbench.find("flash")
    assert len(plan(flash, "hopper", (), ["bf16"], Settings())) == len(plan(flash, "mine", (), ["bf16"], Settings()))


def test_an_error_in_what_a_use_is_compared_with_is_a_finding():
    def fails_reversed(q, k, v, *, cu_seqlens_q=None, **options):
        assert cu_seqlens_q is None or cu_seqlens_q[1] == 9
        return both(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)

    assert set(found(fails_reversed, "two-calls")) == {"two-calls"}


def test_bugs_without_a_check_have_no_score(monkeypatch):
    bugs = [bug for bug in BUGS if bug.name in ("frozen-keys", "no-lse-graph")]
    monkeypatch.setattr("tilewise.verify.api.planted", lambda _: bugs)
    (only,) = score(workbench.find("flash"), (), ["bf16"], Settings(gradients=False))
    assert only.name == "no-lse-graph"


def doubles_for_one(q, k, v, **options):
    """Wrong where exactly one input requires grad."""
    o, lse = both(q, k, v, **options)
    return (o if sum(x.requires_grad for x in (q, k, v)) != 1 else o * 2), lse


@pytest.mark.parametrize(
    ("function", "use"),
    [
        (doubles_for_one, "some-inputs"),
        (needs_a_graph, "no-grad"),
        (forgets_its_graph, "second-backward"),
        (compares_offsets, "same-memory"),
        (steals_the_gradient, "some-inputs"),
    ],
)
def test_what_is_wrong_in_one_use_alone_says_so(function, use):
    compares_offsets.kept = {}
    assert found(function) == {use: [USES[use].status] * len(found(function)[use])}


def test_what_is_wrong_anyway_is_not_judged_by_its_uses():
    results = verify("flash", lambda q, k, v, **options: (q, q[..., 0]), dtypes=["bf16"], uses=["no-grad"]).results
    (finding,) = results[0].findings
    assert finding.status == SKIPPED
    assert "--config lengths=9/0/24,causal=true --dtype bf16" in finding.message
    assert not results[0].passed


def cases_by_use(name, **settings):
    cases = {}
    for check in plan(workbench.find(name), None, (), DTYPES, Settings(), **settings):
        if check.use:
            cases.setdefault((check.implementation.name, check.use), []).append(check.case)
    return cases


def test_the_default_run_uses_what_is_cheap_and_all_of_them_everything(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert set(cases_by_use("flash")) == {(backend, use) for backend in ("triton", "cpu") for use in USES}
    assert set(cases_by_use("nsa")) == {("cpu", use) for use in USES if use != "invariance"}
    for name in OPERATORS:
        cases = cases_by_use(name, everything=True)
        expected = {use for use in USES if applies(use, workbench.find(name).load("suite").use, gradients=True)}
        assert set(cases) == {(backend, use) for backend in ("triton", "cpu") for use in expected}
        # A small one and a drawn one, the same for all.
        ((small, drawn),) = set(map(tuple, cases.values()))
        assert small == str(workbench.find(name).load("suite").use) != drawn


def test_uses_are_asked_for_by_name():
    flash = workbench.find("flash")
    asked = plan(flash, "mine.py:attention", ["small"], ["fp32", "bf16"], Settings(), uses=["no-grad", "two-calls"])
    assert [(check.case, check.dtype, check.use) for check in asked] == [
        ("small", "bf16", "no-grad"),
        ("small", "bf16", "two-calls"),
    ]
    assert asked[0].command().endswith("--config small --dtype bf16 --use no-grad --impl mine.py:attention")
    with pytest.raises(UsageError, match="memory-growth is no case that can be used in another way"):
        plan(flash, None, ["memory-growth"], DTYPES, Settings(), uses=[ALL_USES])
    with pytest.raises(
        UsageError, match=r"no use 'no-grads': did you mean no-grad\? expected all, or some of no-grad, "
    ):
        plan(flash, None, (), DTYPES, Settings(), uses=["no-grads"])


def test_a_use_that_has_nothing_to_try_says_so():
    def outputs_alone(q, k, v, **options):
        return both(q, k, v, **options)[0]

    def no_lse(q, k, v, *, causal=False):
        return outputs_alone(q, k, v, causal=causal)

    (result,) = verify("flash", no_lse, configs=["T=5"], dtypes=["bf16"], uses=["fewer-outputs"]).results
    assert result.passed
    assert result.findings == (Finding(NOT_JUDGED, "fewer-outputs: there are no optional outputs, not judged", NOTE),)
    checks = plan(workbench.find("flash"), None, (), DTYPES, Settings(gradients=False))
    assert {check.use for check in checks} == {"", *USES} - {"some-inputs", "second-backward"}


def depends_on_the_longest(q, k, v, *, cu_seqlens_q=None, **options):
    """Within rounding."""
    o, lse = both(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)
    return o, lse * (1 + 2e-8 * int(cu_seqlens_q.diff().amax()))


def reads_its_neighbours(q, k, v, *, cu_seqlens_q=None, **options):
    o, lse = both(q, k, v, cu_seqlens_q=cu_seqlens_q, **options)
    return o + 0 * q.sum(), lse


def test_what_depends_on_other_sequences_is_found():
    """Alone; and in a pack that is as long, next to NaN."""
    (result,) = verify("flash", depends_on_the_longest, dtypes=["bf16"], uses=["invariance"]).results
    assert [(one.status, one.severity) for one in result.findings][:1] == [("depends on what is around", WARNING)]
    assert "sequence 0 alone: lse in " in result.findings[0].message
    long = {"configs": ["lengths=60/0/200,causal=true"], "dtypes": ["bf16"], "uses": ["invariance"], "gradients": False}
    (result,) = verify("flash", reads_its_neighbours, **long).results
    assert result.statuses == ("depends on what is around",)
    assert verify("flash", right, **long).results[0].findings == ()
    # Where there is no promise, none is judged.
    selected = verify("nsa-selected", selected_attention, dtypes=["bf16"], uses=["invariance"], gradients=False)
    assert selected.results[0].findings[0].status == NOT_JUDGED


@pytest.mark.parametrize("config", ["splits-pages", pytest.param("leftpad", marks=pytest.mark.slow)])
def test_attention_over_a_cache_depends_on_an_entry_alone(config):
    assert wrong(plan(workbench.find("flash-decode"), None, [config], ["bf16"], Settings(), uses=["invariance"])) == []


def wrong(checks):
    """Findings of any severity, but that a use has nothing to try."""
    return [
        (result.check, finding)
        for result in run_checks(checks)
        for finding in result.findings
        if finding.status != NOT_JUDGED
    ]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_our_operators_pass_every_use_of_a_small_case(name):
    assert wrong(plan(workbench.find(name), None, (), ["bf16"], Settings(), uses=[ALL_USES])) == []


@pytest.mark.nightly
@pytest.mark.gpu
@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize("name", OPERATORS)
def test_our_operators_pass_every_use_of_a_drawn_case(name, seed):
    checks = plan(workbench.find(name), None, (), ["bf16"], Settings(seed), everything=True)
    assert wrong([check for check in checks if check.use]) == []


def failing(bug, cases):
    """The uses of a small case, and the cases, that a planted bug fails."""
    kernels = next(one for one in implementations() if one.name == "triton")
    small = str(SUITE.use)
    checks = [Check("flash", kernels, case, "bf16") for case in (*cases, small)]
    checks += [Check("flash", kernels, small, "bf16", use=use) for use in USES]
    (results,) = run_jobs([Job(tuple(checks), bug.name)])
    return [result.check.use or result.check.case for result in results if not result.passed]


def test_every_use_has_two_bugs_of_its_own():
    assert sorted(bug.use for bug in BUGS) == sorted([*USES, *USES])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_one_use_is_caught_by_it_alone(bug):
    assert failing(bug, ["small"]) == [bug.use]


@pytest.mark.nightly
@pytest.mark.gpu
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_no_case_catches_a_bug_of_one_use(bug):
    kernels = next(one for one in implementations() if one.name == "triton")
    standard = SUITE.standard(kernels.device, kernels.interpreted)
    assert failing(bug, [case.name for case in standard]) == [bug.use]


def doubles_the_default(q, k, v, **options):
    torch.set_default_dtype(torch.float64)
    return both(q, k, v, **options)


def draws(q, k, v, **options):
    torch.rand(3)
    return both(q, k, v, **options)


def takes_threads(q, k, v, **options):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return both(q, k, v, **options)


def takes_tf32(q, k, v, **options):
    torch.set_float32_matmul_precision("high")
    return both(q, k, v, **options)


def takes_tf32_anywhere(q, k, v, **options):
    torch.backends.fp32_precision = "tf32"
    return both(q, k, v, **options)


def takes_bf16_products(q, k, v, **options):
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    return both(q, k, v, **options)


def is_deterministic(q, k, v, **options):
    torch.use_deterministic_algorithms(True)
    return both(q, k, v, **options)


def autocasts(q, k, v, **options):
    results = both(q, k, v, **options)
    torch.set_autocast_enabled("cpu", True)
    return results


def forbids_kernels(q, k, v, **options):
    torch.backends.cuda.enable_flash_sdp(False)
    return both(q, k, v, **options)


def replaces_softmax(q, k, v, **options):
    softmax = torch.softmax
    torch.softmax = lambda *arguments, **named: softmax(*arguments, **named)
    torch.Tensor.softmax = torch.softmax
    return both(q, k, v, **options)


def process():
    return (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.fp32_precision,
        matmul_precision(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.softmax,
        vars(torch.Tensor).get("softmax"),
    )


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (doubles_the_default, "the default dtype: torch.float32 before the call, torch.float64 after it"),
        (draws, "the state of torch's random numbers: others will follow"),
        (takes_threads, "the number of threads: "),
        (
            takes_tf32,
            "the precision of fp32 matmuls (TF32), on a GPU and on a CPU: ('ieee', 'ieee') before the call, ('tf32'",
        ),
        (takes_tf32_anywhere, "the precision of all of fp32: none before the call, tf32 after it"),
        (takes_bf16_products, "('ieee', 'bf16') after it"),
        (is_deterministic, ", (True, False) after it"),
        (autocasts, "autocast on the CPU: False before the call, True after it"),
        (forbids_kernels, "whether attention may use flash: True before the call, False after it"),
        (replaces_softmax, "torch.softmax is another function than before the call"),
    ],
)
def test_changed_settings_are_found_and_put_back(function, says):
    before = process()
    (result,) = verify("flash", function, configs=["small"], dtypes=["fp32"], gradients=False).results
    assert set(result.statuses) == {CHANGES_SETTINGS}
    assert says in " and ".join(finding.message for finding in result.findings)
    assert process() == before
