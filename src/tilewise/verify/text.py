"""Results as lines of text and as JSON, with what failing cases have in common and passing ones do not.

`report.schema.json` next to this file describes every field of the JSON; its version changes when readers have to
change.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tilewise import workbench
from tilewise.verify.bias import biases
from tilewise.verify.compare import INDENT, mark
from tilewise.verify.result import FAILURE, NOT_JUDGED, NOTE, SKIPPED, WARNING, MutantResult, Report, Result
from tilewise.verify.suite import Problem, Suite
from tilewise.workbench.operator import GROWTH

TILES = (128, 64, 32, 16)
# What a line of one check may take.
COLUMNS = 100
# Why checks were skipped, in a verdict.
MOST_REASONS = 3


def patterns(results: Sequence[Result]) -> list[str]:
    """Sentences for each operator and implementation with cases that failed and cases that passed."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.check.case != GROWTH and not (result.check.use or result.skipped):
            groups.setdefault((result.check.operator, str(result.check.implementation)), []).append(result)
    sentences = []
    for (operator, implementation), group in groups.items():
        suite: Suite = workbench.find(operator).load("suite")
        failed = {result.check.case for result in group if not result.passed}
        # A case of nothing but zeros passes no matter what is wrong.
        passed = {result.check.case for result in group if any(c.max_diff for c in result.comparisons)} - failed
        common = _common([suite.find(name).problem for name in failed], [suite.find(name).problem for name in passed])
        if common:
            sentences.append(
                f"{operator} {implementation}: {common} in all {len(failed)} cases that failed, and in none of the"
                f" {len(passed)} that passed"
            )
    return sentences


def _common(failed: Sequence[Problem], passed: Sequence[Problem]) -> str:
    """The first trait, or pair of traits, that separates the two, with enough of both to rule out chance."""
    traits = _traits(failed[0]) if failed else []
    # Each trait by the failed cases that have it, and by the passed ones.
    table = [(name, [has(problem) for problem in failed], [has(problem) for problem in passed]) for name, has in traits]
    shared = [(name, among_passed) for name, among_failed, among_passed in table if all(among_failed)]
    shared += [
        (_negated(name), [not has for has in among_passed])
        for name, among_failed, among_passed in table
        if not any(among_failed)
    ]
    if len(failed) >= 2 and len(passed) >= 2:
        for name, among_passed in shared:
            if not any(among_passed):
                return name
    if len(failed) >= 4 and len(passed) >= 4:
        for (one, among_one), (other, among_other) in itertools.combinations(shared, 2):
            if not any(a and b for a, b in zip(among_one, among_other, strict=True)):
                return f"{one} and {other}"
    return ""


def _negated(name: str) -> str:
    return name.replace(" is ", " is not ", 1) if " is not " not in name else name.replace(" is not ", " is ", 1)


def _traits(example: Problem) -> list[tuple[str, Callable[[Problem], bool]]]:
    traits: list[tuple[str, Callable[[Problem], bool]]] = []
    for tile in TILES:
        traits.append(
            (f"a sequence is longer than {tile}", partial(_any_length, lambda length, tile: length > tile, tile))
        )
        traits.append(
            (
                f"a length is not a multiple of {tile}",
                partial(_any_length, lambda length, tile: length % tile != 0, tile),
            )
        )
    for field in dataclasses.fields(example):
        traits.append((f"{field.name} is given", partial(_is_given, field.name, field.default)))
    return traits


def _is_given(name: str, default: object, problem: Problem) -> bool:
    return bool(getattr(problem, name) != default)


def _any_length(test: Callable[[int, int], bool], tile: int, problem: Problem) -> bool:
    return any(test(length, tile) for length in problem.tokens())


def check_line(result: Result) -> str:
    """One check in at most 100 columns: case, dtype, backend; the tensor closest to its limit, or why it failed."""
    check, worst = result.check, result.worst
    sign = "-" if result.skipped else mark(result.passed)
    name = f"{sign} {check.operator} {_cut(check.use or check.case, 18):<18} {check.dtype:<4} "
    if result.skipped:
        outcome = SKIPPED
    elif not result.passed:
        outcome = ", ".join(result.statuses)
    else:
        nothing = "as in ordinary use" if check.use else "nothing to compare"
        nothing = NOT_JUDGED if any(finding.status == NOT_JUDGED for finding in result.findings) else nothing
        outcome = f"{worst.name} {share_text(worst.share)} of allowed" if worst else nothing
    name += f"{_cut(str(check.implementation), 30):<20} "
    return name + _cut(outcome, COLUMNS - len(name))


def share_text(share: float) -> str:
    """A share of what is allowed, in few characters."""
    return f"{share:.2f}" if share < 100 else f"{share:.0e}"


def _cut(text: str, columns: int) -> str:
    """The text, its middle left out where it is longer than that."""
    if len(text) <= columns:
        return text
    head = (columns - 1) // 2
    return f"{text[:head]}…{text[len(text) - (columns - 1 - head) :]}"


def result_lines(result: Result, figures: bool = False) -> list[str]:
    """A check's line and what was found; every tensor's figures if the check failed or `figures` are asked for."""
    lines = [check_line(result)]
    lines += [
        f"{INDENT}{mark(finding.severity != FAILURE)} {finding.status}: {finding.message}"
        for finding in result.findings
    ]
    if figures or not result.passed:
        lines += [INDENT + line for comparison in result.comparisons for line in comparison.lines()]
    if not result.passed:
        lines.append(f"{INDENT}repeat: {result.check.command()}")
    return lines


def worst_of(results: Iterable[Result]) -> Result | None:
    """The check that is closest to its limit; of those that failed, the first."""
    judged = [(result, worst.share) for result in results if (worst := result.worst)]
    failed = [result for result, _ in judged if not result.passed]
    return failed[0] if failed else max(judged, key=lambda one: one[1], default=(None, 0.0))[0]


def table_lines(results: Sequence[Result]) -> list[str]:
    """One line an operator: its backends, checks that were run, how close the worst of them comes to what is allowed
    and where, and seconds of work; in at most 80 columns.
    """
    results = [result for result in results if not result.skipped]
    rows = [("operator", "backends", "checks", "worst", "where", "seconds")]
    for operator in dict.fromkeys(result.check.operator for result in results):
        of_it = [result for result in results if result.check.operator == operator]
        backends = " ".join(dict.fromkeys(result.check.implementation.name for result in of_it))
        failed = sum(not result.passed for result in of_it)
        found = worst_of(of_it)
        worst, where = "-", ""
        if found and found.worst:
            worst = "-" if math.isnan(found.worst.share) else share_text(found.worst.share)
            where = f"{found.worst.name}, {found.check.case}, {found.check.dtype}"
        checks = f"{len(of_it)}" if not failed else f"{failed} of {len(of_it)} ✗"
        rows.append(
            (operator, _cut(backends, 22), checks, worst, _cut(where, 28), f"{sum(r.seconds for r in of_it):.1f}")
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = (False, False, True, True, False, True)
    return [
        "  ".join(f"{x:>{w}}" if r else f"{x:<{w}}" for x, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in rows
    ]


def mutant_line(mutant: MutantResult) -> str:
    """One planted bug."""
    outcome = f"caught by {mutant.caught_by}: {mutant.status}" if mutant.caught else "GOT AWAY"
    return f"{mark(mutant.caught)} {mutant.operator} {mutant.name:<20} {outcome}  ({mutant.about})"


def verdict_lines(report: Report) -> list[str]:
    """The end of a run: the score of planted bugs, with the names of those that were missed, and the verdict."""
    lines = []
    if report.mutants:
        tried = [mutant for mutant in report.mutants if not mutant.skipped]
        away = [mutant.name for mutant in tried if not mutant.caught]
        score = f"planted bugs: {len(tried) - len(away)} of {len(report.mutants)} caught"
        lines.append(score + (f"; got away: {', '.join(away)}" if away else ""))
    lines += [f"drawn cases: {count} of {operator}" for operator, count in report.searched.items()]
    lines += patterns(report.results)
    failed, count = len(report.failures), len(report.results)
    findings = [finding for result in report.results for finding in result.findings]
    lines += dict.fromkeys(f.message for f in findings if f.severity == NOTE and f.status != SKIPPED)
    leaning = biases(report.results)
    lines += [f"warning: {one}" for one in leaning]
    warnings = sum(finding.severity == WARNING for finding in findings) + len(leaning)
    more = f", {warnings} warnings" if warnings else ""
    if not report.results and not report.mutants:
        return [*lines, "FAIL: nothing was checked"]
    skipped = skips(report)
    if failed or report.skipped:
        passed = count - failed - len(report.skipped)
        outcome = f"{failed} of {count} checks failed" if failed else f"{passed} of {count} checks passed"
        return [*lines, f"FAIL: {outcome}{more}{skipped and f', {skipped}'}"]
    if skipped:
        return [*lines, f"FAIL: all {count} checks passed{more}, {skipped}"]
    if not report.passed:
        return [*lines, f"FAIL: all {count} checks passed, but they miss planted bugs{more}"]
    judged = "outputs and gradients" if any(map(_has_gradients, report.results)) else "outputs"
    judged += ", as far as they are judged," if any(finding.severity == NOTE for finding in findings) else ""
    return [*lines, f"PASS: all {count} checks passed: {judged} against fp64 truth{more}"]


def _has_gradients(result: Result) -> bool:
    suite: Suite = workbench.find(result.check.operator).load("suite")
    return result.check.settings.gradients and suite.problem.differentiable


def skips(report: Report) -> str:
    """How much of a run was skipped, and why; nothing where all of it was run."""
    bugs = [mutant for mutant in report.mutants if mutant.skipped]
    counts = [f"{len(report.skipped)} skipped"] if report.skipped else []
    counts += [f"{len(bugs)} planted bugs skipped"] if bugs else []
    messages = [f.message for result in report.skipped for f in result.findings if f.status == SKIPPED]
    reasons = list(dict.fromkeys(messages + [bug.status for bug in bugs]))
    more = [f"and {len(reasons) - MOST_REASONS} other reasons"] if len(reasons) > MOST_REASONS else []
    return f"{', '.join(counts)}: {'; '.join(reasons[:MOST_REASONS] + more)}" if counts else ""


SCHEMA = "tilewise.verify"
VERSION = 1


def as_json(report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str) -> str:
    """The report as JSON text. Numbers that JSON does not have become the strings "nan", "inf" and "-inf"."""
    results = [
        {
            **_plain(result),
            "case": result.check.case,
            "implementation": str(result.check.implementation),
            "passed": result.passed,
            "skipped": result.skipped,
            "statuses": result.statuses,
            "command": result.check.command(),
        }
        for result in report.results
    ]
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "passed": report.passed,
        "command": command,
        "environment": environment,
        "doctor": doctor,
        "results": results,
        "mutants": [{**_plain(mutant), "caught": mutant.caught} for mutant in report.mutants],
        "searched": report.searched,
        "biases": [dataclasses.asdict(one) for one in biases(report.results)],
    }
    return json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(value)
    check = plain.pop("check", None)
    plain.pop("interpreted", None)
    if check:
        plain = {
            "operator": check["operator"],
            "dtype": check["dtype"],
            "use": check["use"],
            "device": check["implementation"].device,
            "settings": check["settings"],
        } | plain
    plain["findings"] = [finding._asdict() for finding in plain["findings"]] if "findings" in plain else None
    return {key: x for key, x in plain.items() if key != "findings" or x is not None}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value
