"""Prints results as they come, and a verdict."""

from collections.abc import Iterable

from rich.console import Console

from tilewise.verify.run import Result


def print_results(results: Iterable[Result], console: Console, verbose: bool) -> bool:
    """A line a case, all its tensors where it failed or verbose is on, and the verdict; returns whether all passed."""
    count = 0
    failed = 0
    for result in results:
        count += 1
        failed += not result.passed
        worst = result.worst
        mark = "[green]✓[/]" if result.passed else "[red]✗[/]"
        name = f"{result.operator} {result.case:<14} {result.dtype:<5} {result.backend:<20}"
        console.print(
            f"{mark} {name} max {worst.max_diff:.2e}  mean {worst.mean_diff:.2e}  std {worst.std_diff:.2e}  ({worst.name})", highlight=False
        )
        if verbose or not result.passed:
            for comparison in result.comparisons:
                console.print(f"    {comparison.line()}", highlight=False, markup=False)
    if count == 0:
        console.print("[red]FAIL[/]: nothing was checked")
    elif failed:
        console.print(f"[red]FAIL[/]: {failed} of {count} checks failed", highlight=False)
    else:
        console.print(f"[green]PASS[/]: all {count} checks passed: outputs, LSE and gradients against fp64 truth", highlight=False)
    return count > 0 and failed == 0
