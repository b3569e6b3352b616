"""The commands about kernels and machines: inspect, warmup, parallel-plan, doctor. `tilewise.cli` has them and the
others.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from tilewise import workbench
from tilewise.cli_base import check_words, interpret_where_no_gpu, make_console, wrong_usage_exits_with_2
from tilewise.workbench.operator import UsageError

app = typer.Typer()


@app.command()
def inspect(
    operator: Annotated[
        str | None, typer.Argument(metavar="[OP]", help="The operator, or a file that --json wrote.")
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Compile what this function launches, in place of ours."),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="Some of sm_80, sm_86, sm_89, sm_90, sm_100 and sm_120; all by default.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="I",
            help="Only configuration I of verify --every-config --list; with --impl a case, small by default.",
        ),
    ] = None,
    direction: Annotated[str | None, typer.Option(help="Only forward or backward.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "bf16",
    sass: Annotated[bool, typer.Option("--sass", help="Print the SASS of every kernel too.")] = False,
    diff: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="What changes to configuration, FILE.py:FUNCTION or saved file OTHER."),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all of it as JSON.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold all default configurations to the allowances.")] = False,
    update: Annotated[bool, typer.Option("--update", help="With --check: rewrite the allowances.")] = False,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="Instead: launches at 10 million tokens, for 32-bit overflow and grid limits."),
    ] = False,
) -> None:
    """Compile kernels without a GPU: registers, spills, shared memory, instructions, occupancy.

    Exit code 1: --check or --audit failed, 2: usage.
    """
    console = make_console()
    command = shlex.join(["tilewise", *sys.argv[1:]])
    with wrong_usage_exits_with_2(console):
        # The operator may be a file that --json wrote.
        check_words((), "launches", (impl,))
        interpret_where_no_gpu()
        from tilewise.inspect.audit import audit as audit_operators
        from tilewise.inspect.audit import print_audit
        from tilewise.inspect.command import Request, run_inspect

        if audit:
            if any((impl, arch, config, direction, sass, diff, json, check, update)):
                raise UsageError("--audit checks the launches of an operator, or of all: it takes no other option")
            passed = print_audit(audit_operators([operator] if operator else workbench.names("audit")), console)
        else:
            passed = run_inspect(
                Request(operator, impl, arch, config, direction, dtype, sass, diff, json, check, update, command),
                console,
            )
    if not passed:
        raise typer.Exit(1)


@app.command()
def warmup(
    operators: Annotated[
        list[str], typer.Argument(metavar="OP...", help="Operators to compile, such as flash, nsa, hstu and bsa.")
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B=..,T=..",
            help="A problem written out (B=1,T=4096,H=16,D=128,causal), or a case by name; may be repeated.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Some of bf16, fp16 and fp32.")] = "bf16",
    arch: Annotated[
        str | None, typer.Option(metavar="sm_90", help="The GPU to compile for; by default the one that is here.")
    ] = None,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Leave the backward out.")] = False,
) -> None:
    """Compile kernels ahead of time into Triton's cache, with or without a GPU.

    Exit code 1: a kernel does not compile; 2: wrong usage.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = make_console()
    with wrong_usage_exits_with_2(console):
        check_words(operators, "suite")
    interpret_where_no_gpu()
    from tilewise._warmup import warmup as compile_ahead

    dtypes = [name.strip() for name in dtype.split(",")]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("kernels"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=None)

            def advanced(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total or None)

            warmed = compile_ahead(
                *operators, shapes=shapes or [], dtypes=dtypes, arch=arch, forward_only=forward_only, advanced=advanced
            )
    except ValueError as error:
        console.print(f"[red]error[/]: {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
    for kernel, said in warmed.errors.items():
        console.print(f"✗ {kernel}: {said}", markup=False, highlight=False)
    for note in warmed.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    found = warmed.kernels - warmed.compiled - len(warmed.errors)
    console.print(
        f"{warmed.compiled} kernels compiled, {found} were in the cache already ({warmed.seconds:.0f} s)",
        highlight=False,
    )
    if warmed.errors:
        raise typer.Exit(1)


@app.command("parallel-plan")
def parallel_plan(
    world: Annotated[int, typer.Option(min=1, metavar="N", help="How many ranks share the tokens.")],
    heads: Annotated[str, typer.Option(metavar="Hq/Hk", help="Query and KV heads, such as 64/4.")],
    dim: Annotated[str, typer.Option(metavar="D[/Dv]", help="Channels of a head, and of its values.")],
    tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="The length of one sequence.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,NxTIMES,...", help="Lengths of packed sequences: their assignment is printed too."),
    ] = None,
    method: Annotated[str, typer.Option(help="all_gather or ring.")] = "all_gather",
    link: Annotated[
        float, typer.Option("--link-gb-per-s", metavar="GB/s", help="What a rank sends a second, and receives.")
    ] = 450.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw work, memory and time by rank.")] = None,
) -> None:
    """Say what one sequence over many GPUs would cost each: FLOPs, bytes, memory, predicted time.

    Exit code 2: wrong usage.
    """
    console = make_console()
    with wrong_usage_exits_with_2(console):
        interpret_where_no_gpu()
        from tilewise.parallel.command import Request, run_request

        run_request(Request(tokens, lengths, heads, dim, world, method, link, plot), console)


@app.command()
def doctor(
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the findings as JSON too.")] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Instead: one block for a bug report, without paths.")
    ] = False,
) -> None:
    """Say what tilewise finds on this machine, how kernels will run, and what to do about each finding.

    Exit code 1: a problem; 2: wrong usage.
    """
    from json import dumps

    interpret_where_no_gpu()
    from tilewise.doctor import as_json, examine, print_findings
    from tilewise.doctor import report as block

    if report:
        # As it is: a terminal's width must not break lines that are pasted elsewhere.
        typer.echo(block())
        if json is None:
            return
    findings, console = examine(), make_console()
    healthy = report or print_findings(findings, console)
    if json:
        try:
            json.write_text(dumps(as_json(findings), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            console.print(f"[red]error[/]: {escape(str(json))} cannot be written: {error.strerror}", highlight=False)
            raise typer.Exit(2) from None
    if not healthy:
        raise typer.Exit(1)
