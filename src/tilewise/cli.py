"""`tilewise`: one command, one subcommand a verb. It decides how Triton runs before anything imports triton."""

import importlib.util
import sys
from typing import Annotated

import typer
from rich.console import Console

from tilewise import interpreter, registry

app = typer.Typer(help="Attention kernels people can trust, tile by tile.", no_args_is_help=True, add_completion=False)


def _console() -> Console:
    # A pipe has no width: lines are left whole there, as a reader of logs expects.
    return Console(soft_wrap=not sys.stdout.isatty())


@app.callback()
def _start() -> None:
    # Without torch only doctor runs, to say so.
    if importlib.util.find_spec("torch") is not None:
        interpreter.use_where_no_gpu()


@app.command()
def verify(
    operators: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Operators to check; all of them by default.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every tensor of every case.")] = False,
) -> None:
    """Check operators against their reference: outputs, LSE and gradients of every backend that runs here."""
    from tilewise.verify.report import print_results
    from tilewise.verify.run import verify_operator

    console = _console()
    try:
        chosen = [registry.find(name) for name in operators or registry.OPERATORS]
    except ValueError as error:
        console.print(f"[red]error[/]: {error}", highlight=False)
        raise typer.Exit(2) from None
    results = (result for operator in chosen for result in verify_operator(operator))
    if not print_results(results, console, verbose):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Say what tilewise finds on this machine, how kernels will run, and what to do about each finding."""
    from tilewise.doctor import examine, print_findings

    if not print_findings(examine(), _console()):
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()
