"""Which checks a run consists of: the cases, the growth of memory, and the uses."""

import importlib.util
import itertools
import os
from collections.abc import Sequence

from tilewise.verify.drawing import INTERPRETED, SHORT, drawn
from tilewise.verify.rank_suite import OverRanks
from tilewise.verify.result import HOPPER, Check, Implementation, Settings
from tilewise.verify.suite import FILLS, Mutant, Problem, Suite, make_fill, sequences
from tilewise.verify.uses import USES, applies
from tilewise.workbench.operator import GROWTH, Operator, UsageError, did_you_mean

DTYPES = ("fp32", "fp16", "bf16")
ALL_USES = "all"
# Among so many one fits.
MOST_DRAWN = 60


def implementations(external: str | None = None) -> list[Implementation]:
    """What can be checked here: `external` alone, or every backend (TILEWISE_BACKEND chooses one of them)."""
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
    if interpreting():
        found.append(Implementation(HOPPER, "cpu", interpreted=True))
    wanted = os.environ.get("TILEWISE_BACKEND")
    chosen = [implementation for implementation in found if wanted in (None, "", implementation.name)]
    if not chosen:
        raise UsageError(
            f"TILEWISE_BACKEND is {wanted!r}: expected one that runs here, {' or '.join(i.name for i in found)}"
        )
    return chosen


def planted(operator: Operator, ranks: int = 0) -> tuple[Mutant, ...]:
    """The bugs whose kernels run here; over ranks those of tilewise.parallel."""
    import torch

    from tilewise.ops._host.backend import interpreting

    suite: Suite = operator.load("suite")
    if ranks:
        declared: OverRanks = operator.load("over_ranks")
        return declared.mutants
    if torch.cuda.is_available() and not interpreting():
        return suite.planted(torch.cuda.get_device_capability())
    return suite.planted(None) + (suite.planted_for_hopper() if suite.hopper else ())


def plan(
    operator: Operator,
    external: str | None,
    configs: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    everything: bool = False,
    uses: Sequence[str] = (),
    ranks: int = 0,
) -> list[Check]:
    """The standard checks of an operator, or those of the cases in `configs`; or nothing but the `uses` of these; or
    cases over so many `ranks`.

    Cases in `configs` are checked in every dtype, and so are the standard ones, except for our own backends without a
    GPU, where each check is slow: there, unless `everything` is asked for, a case runs in one dtype, in turn, and in
    another one on the next backend; of those that kernels for Hopper take, simulated, one.
    """
    suite: Suite = operator.load("suite")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if not dtypes:
        raise UsageError(f"no dtype was given: expected some of {','.join(DTYPES)}")
    for name, tolerance in (("rtol", settings.rtol), ("atol", settings.atol)):
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise UsageError(f"{name} is {tolerance}: expected a number from 0 on")
    if settings.fill not in FILLS:
        close = did_you_mean(settings.fill, FILLS)
        raise UsageError(f"there is no fill {settings.fill!r}: {close}expected one of {', '.join(FILLS)}")
    if unknown:
        raise UsageError(f"there is no dtype {unknown[0]!r}: expected some of {','.join(DTYPES)}")
    try:
        chosen = [config if config == GROWTH else suite.find(config).name for config in configs]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from None
    for use in uses:
        if use not in (*USES, ALL_USES):
            close = did_you_mean(use, USES)
            raise UsageError(f"there is no use {use!r}: {close}expected {ALL_USES}, or some of {', '.join(USES)}")
    if uses and GROWTH in chosen:
        raise UsageError(
            f"{GROWTH} is no case that can be used in another way: leave it out of --config, or --use away"
        )
    if uses and settings.schedules:
        raise UsageError("--schedules runs cases, and --use their other uses: give one of them")
    if ranks:
        if external or uses or settings.schedules or GROWTH in chosen:
            raise UsageError(
                f"--parallel runs our own backends' cases: leave out --impl, --use, --schedules and {GROWTH}"
            )
        return _over_ranks(operator, ranks, chosen, dtypes, settings, everything)
    turns: dict[str, int] = {}
    checks = []
    for implementation in implementations(external):
        if implementation.name == HOPPER and not implementation.external:
            checks += _simulated(operator, implementation, chosen, dtypes, settings, everything, uses)
            continue
        standard = suite.standard(implementation.device, implementation.interpreted, everything or bool(external))
        left_out = suite.dear if implementation.interpreted and not (everything or external) else ()
        names = [] if uses else chosen or [case.name for case in standard if case.name not in left_out]
        for i, name in enumerate(names):
            # The first, `small`, takes the last dtype: what is probed in one dtype alone is probed in that.
            turns[name] = turns.get(name, i - 2) + 1
            one = implementation.device == "cpu" and not (everything or external or chosen)
            here = [dtypes[turns[name] % len(dtypes)]] if one else dtypes
            checks += [Check(operator.name, implementation, name, dtype, settings) for dtype in here]
        if not (chosen or uses):
            checks.append(Check(operator.name, implementation, GROWTH, dtypes[-1], settings))
        if uses:
            used = chosen or [str(suite.use)]
        elif chosen:
            used = []
        else:
            used = _used(suite, implementation, everything, settings.seed)
        checks += [
            Check(operator.name, implementation, name, dtypes[-1], settings, use)
            for name in used
            for use in (uses if uses and ALL_USES not in uses else USES)
            if use in uses or applies(use, suite.find(name).problem, settings.gradients)
        ]
    return checks


def _over_ranks(
    operator: Operator,
    ranks: int,
    chosen: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    everything: bool,
) -> list[Check]:
    """Cases over ranks: by default each in one dtype, in turn, and where kernels are interpreted a few."""
    suite: Suite = operator.load("suite")
    declared: OverRanks = operator.load("over_ranks")
    lacking = [name for name in chosen if not declared.takes(suite.find(name).problem)]
    if lacking:
        raise UsageError(
            f"{operator.name}: {', '.join(lacking)} is no self-attention, which alone runs over ranks: leave it out of"
            " --config"
        )
    found = [one._replace(ranks=ranks) for one in implementations() if one.device == "cpu" and one.name != HOPPER]
    if not found:
        raise UsageError("--parallel runs on the CPU, and TILEWISE_BACKEND chooses nothing that does: expected cpu")
    checks = []
    for implementation in found:
        standard = suite.standard(implementation.device, implementation.interpreted, everything)
        taken = [case.name for case in standard if declared.takes(case.problem)]
        few = implementation.interpreted and not everything
        names = chosen or (declared.few if few else [*taken, *declared.cases])
        for i, name in enumerate(names):
            here = dtypes if chosen or everything else [dtypes[i % len(dtypes)]]
            checks += [Check(operator.name, implementation, name, dtype, settings) for dtype in here]
    return checks


def left_out(operator: Operator, everything: bool) -> int:
    """How many standard cases do not run over ranks."""
    suite, declared = operator.load("suite"), operator.load("over_ranks")
    return sum(not declared.takes(case.problem) for case in suite.standard("cpu", False, everything))


def _simulated(
    operator: Operator,
    implementation: Implementation,
    chosen: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    everything: bool,
    uses: Sequence[str],
) -> list[Check]:
    """Of an operator's kernels for Hopper, simulated: they take 16 bits alone.

    Cases that they do not take, which then say so, and other uses, which take long, are for those who ask for this
    backend alone.
    """
    suite: Suite = operator.load("suite")
    narrow = [dtype for dtype in dtypes if dtype != "fp32"]
    asked = os.environ.get("TILEWISE_BACKEND") == HOPPER
    if not suite.hopper or not narrow or (uses and not asked):
        return []
    names = [name for name in chosen if asked or name in suite.hopper]
    if not chosen:
        names = list(suite.hopper[: None if everything else 1])
    if not names:
        return []
    if uses:
        used = USES if ALL_USES in uses else uses
        return [Check(operator.name, implementation, names[0], narrow[-1], settings, use) for use in used]
    here = narrow if chosen or everything else narrow[-1:]
    return [
        Check(operator.name, implementation, name, dtype, settings)
        for name in names
        if name != GROWTH
        for dtype in here
    ]


def _used(suite: Suite, implementation: Implementation, everything: bool, seed: int) -> list[str]:
    """The cases that are used in every way by default: a small one and a drawn one.

    Where our own kernels are interpreted, that one is small which is cheap, and unless `everything` is asked for there
    is no other.
    """
    slow = implementation.interpreted and not everything
    used = [str(suite.use)] if suite.cheap_to_use or not slow else []
    if implementation.device == "cpu" and not (implementation.external or everything):
        return used
    return [*used, *_drawn_use(suite, seed)]


def _drawn_use(suite: Suite, seed: int) -> list[str]:
    """A short drawn problem of more than one sequence, packed if the small one is not, and the other way round where
    one is drawn; none if none fits.
    """

    def is_like_the_small_one(problem: Problem) -> bool:
        return bool(problem.offsets()) == bool(suite.use.offsets())

    def fits(problem: Problem) -> bool:
        short = 1 < max(problem.tokens(), default=0) <= SHORT
        return short and sequences(problem, problem.tensors(make_fill("zero", seed))) > 1

    if importlib.util.find_spec("hypothesis") is None:
        # Another project's tests may lack it.
        return []
    found = filter(fits, sorted(drawn(suite, seed, MOST_DRAWN, INTERPRETED), key=is_like_the_small_one))
    return [str(problem) for problem in itertools.islice(found, 1)]
