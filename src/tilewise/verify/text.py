"""Results as lines of text."""

from tilewise.verify.compare import Comparison
from tilewise.verify.pattern import patterns
from tilewise.verify.result import FAILURE, MutantResult, Report, Result

INDENT = "    "


def result_lines(result: Result, verbose: bool) -> list[str]:
    """One line, and all that is known where the check failed or `verbose` is on."""
    check = result.check
    name = f"{check.operator} {check.case:<15} {check.dtype:<4} {check.implementation!s:<20}"
    worst = result.worst
    summary = f" {_statistics(worst)}  ({worst.name})" if worst else ""
    lines = [f"{_mark(result.passed)} {name}{summary if result.passed else ' ' + ', '.join(result.statuses)}"]
    details = verbose or not result.passed
    lines += [
        f"{INDENT}{_mark(finding.severity != FAILURE)} {finding.status}: {finding.message}"
        for finding in result.findings
    ]
    if details:
        lines += [INDENT + line for comparison in result.comparisons for line in comparison_lines(comparison)]
    if not result.passed:
        lines.append(f"{INDENT}repeat: {check.command()}")
    return lines


def comparison_lines(comparison: Comparison) -> list[str]:
    """One tensor: its statistics, and where it failed what is wrong with it."""
    failure = comparison.failure
    allowed = "" if comparison.allowed != comparison.allowed else f"  allowed {comparison.allowed:.2e}"
    lines = [f"{_mark(comparison.passed)} {comparison.name:<5} {_statistics(comparison)}{allowed}"]
    if failure is None:
        return lines
    details = [f"{failure.status}: {failure.problem}"]
    if failure.elements:
        share = 100 * failure.exceeding / failure.elements
        low, high = failure.expected_range
        details += [
            (
                f"{failure.exceeding} of {failure.elements} elements ({share:.3g} %) exceed rtol {failure.rtol:g} and"
                f" atol {failure.atol:g}"
            ),
            f"from {failure.actual_range[0]:.4g} to {failure.actual_range[1]:.4g}, expected {low:.4g} to {high:.4g}",
        ]
    return lines + [
        f"{INDENT}{detail}" for detail in [*details, *(f"looks like: {sentence}" for sentence in failure.diagnosis)]
    ]


def mutant_line(mutant: MutantResult) -> str:
    """One planted bug."""
    outcome = f"caught by {mutant.caught_by}: {mutant.status}" if mutant.caught else "GOT AWAY"
    return f"{_mark(mutant.caught)} {mutant.operator} {mutant.name:<20} {outcome}  ({mutant.about})"


def verdict_lines(report: Report) -> list[str]:
    """The end of a run: the score of planted bugs, with the names of those that got away, and the verdict."""
    lines = []
    if report.mutants:
        away = [mutant.name for mutant in report.mutants if not mutant.caught]
        score = f"planted bugs: {len(report.mutants) - len(away)} of {len(report.mutants)} caught"
        lines.append(score + (f"; got away: {', '.join(away)}" if away else ""))
    lines += [f"drawn cases: {count} of {operator}" for operator, count in report.searched.items()]
    lines += patterns(report.results)
    failed, count = len(report.failures), len(report.results)
    warnings = sum(finding.severity != FAILURE for result in report.results for finding in result.findings)
    more = f", {warnings} warnings" if warnings else ""
    if not report.results and not report.mutants:
        return [*lines, "FAIL: nothing was checked"]
    if failed:
        return [*lines, f"FAIL: {failed} of {count} checks failed{more}"]
    if not report.passed:
        return [*lines, f"FAIL: all {count} checks passed, but they miss planted bugs{more}"]
    judged = "outputs and gradients" if all(result.check.settings.gradients for result in report.results) else "outputs"
    return [*lines, f"PASS: all {count} checks passed: {judged} against fp64 truth{more}"]


def _mark(passed: bool) -> str:
    return "✓" if passed else "✗"


def _statistics(comparison: Comparison) -> str:
    c = comparison
    return (
        f"max_diff {c.max_diff:.2e}  mean_diff {c.mean_diff:.2e}  std_diff {c.std_diff:.2e}  "
        f"max_rel_diff {c.max_rel_diff:.2e}  mean_rel_diff {c.mean_rel_diff:.2e}"
    )
