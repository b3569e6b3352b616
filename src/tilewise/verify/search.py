"""Further cases, drawn by hypothesis; a failure is shrunk to the smallest problem that still shows it."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise.verify.result import Check, Implementation, Result, Settings
from tilewise.verify.suite import Suite
from tilewise.workbench.operator import Operator


class _FailedError(Exception):
    pass


def find_failure(
    operator: Operator,
    implementation: Implementation,
    count: int,
    dtypes: Sequence[str],
    settings: Settings,
    run: Callable[[Check], Result],
) -> Result | None:
    """Try `count` drawn cases; the smallest failure found, or None."""
    import hypothesis
    from hypothesis import strategies as st

    suite: Suite = operator.load("suite")
    smallest: Result | None = None

    @st.composite
    def checks(draw: Callable[[Any], Any]) -> Check:
        problem = suite.draw(draw)
        # A problem of nothing but defaults writes out as nothing: name its first field.
        text = str(problem) or "B=1"
        return Check(operator.name, implementation, text, draw(st.sampled_from(tuple(dtypes))), settings)

    @hypothesis.seed(settings.seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(checks())
    def trial(check: Check) -> None:
        nonlocal smallest
        result = run(check)
        if not result.passed:
            # The last failure that hypothesis shows is the smallest.
            smallest = result
            raise _FailedError

    # What hypothesis keeps beside its examples is not left where the user works.
    hypothesis.configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "tilewise-hypothesis")
    try:
        trial()
    except (_FailedError, hypothesis.errors.Flaky):
        # Flaky: a second run of the same case passed. That it failed once is a finding all the same.
        return smallest
    return None
