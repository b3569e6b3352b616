"""Which checks a run consists of."""

import os
from collections.abc import Sequence

from tilewise.verify.result import Check, Implementation, Settings
from tilewise.verify.suite import GROWTH, Mutant, Suite
from tilewise.workbench.operator import Operator, UsageError

DTYPES = ("fp32", "fp16", "bf16")


def implementations(operator: Operator, external: str | None = None) -> list[Implementation]:
    """What can be checked here: `external` alone, or the operator's backends (TILEWISE_BACKEND chooses one of them)."""
    import torch

    gpu = torch.cuda.is_available()
    if external:
        return [Implementation(external, "cuda" if gpu else "cpu", external=True)]
    from tilewise.ops._host.backend import interpreting

    found = (
        [Implementation("triton", "cpu" if interpreting() else "cuda", interpreted=interpreting())]
        if interpreting() or gpu
        else []
    )
    found.append(Implementation("cpu", "cpu"))
    wanted = os.environ.get("TILEWISE_BACKEND")
    chosen = [implementation for implementation in found if wanted in (None, "", implementation.name)]
    if not chosen:
        raise UsageError(
            f"TILEWISE_BACKEND is {wanted!r}: expected one that runs here, {' or '.join(i.name for i in found)}"
        )
    return chosen


def planted(operator: Operator) -> tuple[Mutant, ...]:
    """The bugs whose kernels run here."""
    import torch

    from tilewise.ops._host.backend import interpreting

    suite: Suite = operator.load("suite")
    compiled = torch.cuda.is_available() and not interpreting()
    return suite.planted(torch.cuda.get_device_capability() if compiled else None)


def plan(
    operator: Operator, external: str | None, configs: Sequence[str], dtypes: Sequence[str], settings: Settings
) -> list[Check]:
    """The standard checks of an operator, or those of the cases in `configs`.

    Cases in `configs` are checked in every dtype, and so are the standard ones, except for our own backends without a
    GPU, where each check is slow: there only `small` is, and every other case runs in one dtype, in turn, and in
    another one on the next backend.
    """
    suite: Suite = operator.load("suite")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if not dtypes:
        raise UsageError(f"no dtype was given: expected some of {','.join(DTYPES)}")
    for name, tolerance in (("rtol", settings.rtol), ("atol", settings.atol)):
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise UsageError(f"{name} is {tolerance}: expected a number from 0 on")
    if unknown:
        raise UsageError(f"there is no dtype {unknown[0]!r}: expected some of {','.join(DTYPES)}")
    try:
        chosen = [config if config == GROWTH else suite.find(config).name for config in configs]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from None
    turns: dict[str, int] = {}
    checks = []
    for implementation in implementations(operator, external):
        names = chosen or [case.name for case in suite.standard(implementation.device, implementation.interpreted)]
        for i, name in enumerate(names):
            turns[name] = turns.get(name, i - 1) + 1
            one = implementation.device == "cpu" and not external and not chosen and name != "small"
            here = [dtypes[turns[name] % len(dtypes)]] if one else dtypes
            checks += [Check(operator.name, implementation, name, dtype, settings) for dtype in here]
        if not chosen:
            checks.append(Check(operator.name, implementation, GROWTH, dtypes[-1], settings))
    return checks
