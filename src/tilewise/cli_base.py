"""What the command line's commands share. They import torch inside, after what can be said without it."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence

import typer
from rich.console import Console
from rich.markup import escape

from tilewise import interpreter, workbench
from tilewise.workbench.operator import UsageError, place_and_name


def make_console() -> Console:
    """Where commands print. A pipe has no width: lines are left whole there, as a reader of logs expects."""
    return Console(soft_wrap=not sys.stdout.isatty())


@contextlib.contextmanager
def wrong_usage_exits_with_2(console: Console) -> Iterator[None]:
    """Inside, a UsageError is printed and ends the command."""
    try:
        yield
    except UsageError as error:
        console.print(f"[red]error[/]: {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


def interpret_where_no_gpu() -> None:
    """Where there is no GPU, kernels are interpreted in this process, repaired. This imports torch: it comes after what
    can be said without. Without torch only doctor runs, to say so.
    """
    if importlib.util.find_spec("torch") is not None:
        interpreter.use_where_no_gpu()


def check_words(
    operators: Sequence[str], part: str, impls: Sequence[str | None] = (), cases: Sequence[str] = ()
) -> None:
    """What is wrong with words of the command line, at once."""
    found = [workbench.find(name, part) for name in operators]
    for impl in impls:
        if impl:
            place_and_name(impl)
    for operator in found:
        for case in cases:
            workbench.check_case(operator, case)
