"""The battery of `tilewise verify` as parametrised tests of another project.

    @pytest.mark.tilewise("flash", dtypes=["fp16"])
    def test_my_attention(tilewise_check):
        tilewise_check(my_attention)

One test per case and dtype, and one per use of a small and a drawn case. With `tilewise_interpret = true` in pytest's
settings, Triton interprets kernels where there is no GPU, and its interpreter is repaired: that is decided here, before
any conftest or test can import triton.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tilewise import interpreter

MARKER = (
    "tilewise(operator, *, configs=(), dtypes=('fp32', 'fp16', 'bf16'), uses=(), **settings): the checks that the"
    " tilewise_check fixture makes; settings are seed, fill, gradients, repeat, rtol and atol"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The one setting."""
    parser.addini(
        "tilewise_interpret", "have Triton interpret kernels where there is no GPU", type="bool", default=False
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Choose interpretation first of all, repaired also for kernels that use no operator of ours."""
    if early_config.getini("tilewise_interpret"):
        interpreter.use_where_no_gpu()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per check."""
    if "tilewise_check" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("tilewise")
    if marker is None:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} uses tilewise_check: mark it with @pytest.mark.tilewise(operator, ...)"
        )
    checks = _checks(*marker.args, **marker.kwargs)
    metafunc.parametrize(
        "tilewise_check",
        checks,
        indirect=True,
        ids=["-".join(filter(None, (check.case, check.dtype, check.use))) for check in checks],
    )


def _checks(
    operator: str, *, configs: Any = (), dtypes: Any = ("fp32", "fp16", "bf16"), uses: Any = (), **settings: Any
) -> list[Any]:
    from tilewise import workbench
    from tilewise.verify.plan import plan
    from tilewise.verify.result import Settings
    from tilewise.workbench.operator import UsageError

    try:
        return plan(workbench.find(operator), "tilewise_check", configs, dtypes, Settings(**settings), uses=uses)
    except (TypeError, UsageError) as error:
        raise pytest.UsageError(f"@pytest.mark.tilewise: {error}") from None


@pytest.fixture
def tilewise_check(request: pytest.FixtureRequest) -> Callable[[Callable[..., Any]], None]:
    """Call it with the implementation: it fails the test with what `tilewise verify` would print."""
    from tilewise import workbench
    from tilewise.verify.run import Runner
    from tilewise.verify.text import result_lines

    def check(function: Callable[..., Any]) -> None:
        result = Runner(workbench.find(request.param.operator), function).run(request.param)
        if result.skipped:
            pytest.skip(result.findings[0].message)
        if not result.passed:
            # The command to repeat it would name no file: the test itself does.
            pytest.fail("\n".join(result_lines(result)[:-1]), pytrace=False)

    return check
