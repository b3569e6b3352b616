"""`tilewise`: one command, one subcommand a verb. It decides how Triton runs before anything imports triton."""

import re
import secrets
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tilewise import cli_machine, workbench
from tilewise.cli_base import check_words, interpret_where_no_gpu, make_console, wrong_usage_exits_with_2
from tilewise.workbench.operator import UsageError

# What verify checks where no dtype is named, and the minutes that it may take.
DTYPES = "fp32,fp16,bf16"
BUDGET = 60.0
# How inputs may be filled: as verify/suite.py has it, which imports torch.
FILLS = "random, one-signed, heavy-tails, small-head, constant, zero, range, range-raw"
# The largest seed, and what a random one is below: short enough to be read.
MOST_SEED, MOST_RANDOM = 2**62, 10**9

app = typer.Typer(help="Attention kernels people can trust, tile by tile.", no_args_is_help=True, add_completion=False)


@app.command()
def verify(
    operators: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Operators to check; all of them by default.")
    ] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Check this function, or package.module:function, in place of ours. It runs with your rights, in no"
            " sandbox.",
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A case by name or written out (T=65,D=16); may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtypes to check.")] = DTYPES,
    by_range: Annotated[
        bool, typer.Option("--range", "-r", help="Fill inputs by rule: element i of n is i/n, k negated.")
    ] = False,
    range_raw: Annotated[
        bool, typer.Option("--range-raw", help="Fill inputs by rule: element i is i, k negated.")
    ] = False,
    fill: Annotated[str | None, typer.Option(metavar="NAME", help=f"Fill inputs by a law or rule: {FILLS}.")] = None,
    seed: Annotated[
        str, typer.Option(metavar="N", help="Seed of random inputs; `random` takes a fresh one and prints it.")
    ] = "42",
    search: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Draw N further cases, of all shapes, options and laws of values; a failure is shrunk to one command.",
        ),
    ] = 0,
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Judge by allclose with this, in place of eager torch's error; 1e-3 where only atol is given."
        ),
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Likewise; 1e-4 where only rtol is given.")] = None,
    no_grad: Annotated[bool, typer.Option("--no-grad", help="Check outputs alone.")] = False,
    mutants: Annotated[bool, typer.Option("--mutants", help="Score the same checks by planted bugs.")] = False,
    repeat: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Runs of each case that must agree bit for bit.")
    ] = None,
    schedules: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Run simulated Gluon kernels under N further interleavings too."),
    ] = 0,
    schedule: Annotated[
        list[int] | None, typer.Option(min=0, metavar="SEED", help="Under this one of them; may be repeated.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results as JSON.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report with heat maps of the errors.")
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List operators, cases and planted bugs.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Without a GPU: all cases, in every dtype, on our own backends too.")
    ] = False,
    budget: Annotated[
        float,
        typer.Option(metavar="MINUTES", help="What has not begun by then is skipped, and the run fails."),
    ] = BUDGET,
    use: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this way of using it (--list names them), or all; may be repeated."),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    verbosity: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="A line a check; -vv: every tensor's figures too.")
    ] = 0,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Run the cases over N processes, by a ContextPlan, on the CPU: flash, nsa."
        ),
    ] = None,
    leave_out: Annotated[
        bool,
        typer.Option(
            "--leave-out",
            help="Instead: leave out each statement that synchronises in turn, of simulated Gluon kernels, and name"
            " those that nothing misses.",
        ),
    ] = False,
    every_config: Annotated[
        bool, typer.Option("--every-config", help="Instead: run every tile configuration of one operator.")
    ] = False,
    kernel: Annotated[int | None, typer.Option(metavar="I", help="With --every-config: only configuration I.")] = None,
    small: Annotated[bool, typer.Option("--small", help="With --every-config: two tiles each way.")] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="With --every-config: mismatches by row, head and channel.")
    ] = False,
) -> None:
    """Check an implementation against the reference: outputs, gradients, edge cases.

    Exit code 0: all passed; 1: a failure; 2: wrong usage.
    """
    console = make_console()
    with wrong_usage_exits_with_2(console):
        if impl and len(operators or ()) != 1:
            raise UsageError(f"--impl implements one operator: name it, one of {', '.join(workbench.names('suite'))}")
        check_words(operators or (), "suite", (impl,), config or ())
        interpret_where_no_gpu()
        from tilewise.verify.command import Request, list_cases, run_request
        from tilewise.verify.result import SEED, Settings

        if by_range + range_raw + (fill is not None) > 1:
            raise UsageError("--fill, --range and --range-raw fill the same inputs: give one of them")
        number = _seed(seed)
        if not every_config and (kernel is not None or small or diff):
            raise UsageError("--kernel, --small and --diff choose among tile configurations: add --every-config")
        if leave_out:
            flags = by_range, range_raw, mutants, everything, fail_fast, every_config, list_names
            values = fill, search, use, verbosity, schedules, schedule, repeat, parallel, json, html
            if any(flags) or any(values) or (rtol, atol) != (None, None) or (number, budget) != (SEED, BUDGET):
                raise UsageError("--leave-out takes --impl, --config, --dtype and --no-grad, no other option")
            _leave_out(operators, impl, config, dtype, not no_grad)
            return
        if every_config:
            given = impl, config, use, rtol, atol, repeat, json, html
            others = fill, search, no_grad, mutants, everything, fail_fast, verbosity, schedules, schedule, parallel
            if (
                any(x is not None for x in given)
                or any(others)
                or range_raw
                or (dtype, number, budget) != (DTYPES, SEED, BUDGET)
            ):
                raise UsageError("--every-config takes --kernel, --small, --diff, --range and --list, no other option")
            if operators is None or len(operators) != 1:
                names = ", ".join(workbench.names("configs"))
                raise UsageError(f"--every-config runs tile configurations of one operator: name it, one of {names}")
            _every_config(operators[0], kernel, small, diff, "range" if by_range else "random", list_names)
            return
        if list_names:
            list_cases(operators or [], console)
            return
        fill = "range" if by_range else "range-raw" if range_raw else fill or "random"
        seeds = tuple(dict.fromkeys((*(schedule or ()), *range(schedules))))
        settings = Settings(number, fill, not no_grad, repeat, rtol, atol, seeds)
        what = operators or [], impl, config or [], [name.strip() for name in dtype.split(",")]
        command = shlex.join(["tilewise", *sys.argv[1:]])
        if seed == "random":
            console.print(f"seed {number}", highlight=False)
            command = re.sub(r"--seed[ =]random\b", f"--seed {number}", command)
        amount = search, mutants, everything, budget
        request = Request(*what, settings, *amount, use or [], parallel or 0, json, html, fail_fast, verbosity, command)
        try:
            passed = run_request(request, console)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if not passed:
        raise typer.Exit(1)


def _seed(word: str) -> int:
    """The number that --seed takes, a fresh one for `random`."""
    number = secrets.randbelow(MOST_RANDOM) if word == "random" else int(word) if word.isdecimal() else -1
    if not 0 <= number <= MOST_SEED:
        raise UsageError(f"--seed {word}: expected a whole number from 0 to {MOST_SEED}, or random")
    return number


def _leave_out(
    operators: list[str] | None, impl: str | None, config: list[str] | None, dtype: str, gradients: bool
) -> None:
    from tilewise.verify.leave_out import Request, run_request

    if not operators or len(operators) != 1:
        raise UsageError("--leave-out runs kernels of one operator: name it")
    # In 16 bits, as such kernels are.
    chosen = "bf16" if dtype == DTYPES else dtype
    if chosen not in DTYPES.split(","):
        raise UsageError(f"--leave-out runs in one dtype: expected one of {DTYPES}, got {dtype}")
    if not run_request(Request(operators[0], impl, config or [], chosen, gradients), make_console()):
        raise typer.Exit(1)


def _every_config(operator: str, kernel: int | None, small: bool, diff: bool, fill: str, list_names: bool) -> None:
    console = make_console()
    with wrong_usage_exits_with_2(console):
        check_words([operator], "configs")
        interpret_where_no_gpu()
        from tilewise.verify.every_config import Request, list_entries, run_request

        request = Request(operator, kernel, small, diff, fill)
        if list_names:
            for line in list_entries(request):
                console.print(line, markup=False, highlight=False)
            return
        passed = run_request(request, console)
    if not passed:
        raise typer.Exit(1)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="The file to write; its tests go next to it.")],
) -> None:
    """Write a small attention kernel that is right, and its tests, to start from.

    Exit code 2: the name will not do, or a file is there already.
    """
    with wrong_usage_exits_with_2(make_console()):
        from tilewise.new import write

        lines = write(file)
    # As they are: a terminal's width must not break commands that are pasted.
    typer.echo("\n".join(lines))


@app.command()
def trace(
    operator: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    block_m: Annotated[
        int | None, typer.Option(help="Queries a tile (nsa-selected: rows, a token's heads each); 64 by default.")
    ] = None,
    block_n: Annotated[
        int | None, typer.Option(help="Keys a tile (nsa-selected: a block); by default 64, of nsa operators 16.")
    ] = None,
    kernel_index: Annotated[
        int | None, typer.Option(metavar="I", help="The tiles of configuration I of the operator's table instead.")
    ] = None,
    seq_blocks: Annotated[int, typer.Option(help="Length of the sequence in tiles of queries.")] = 2,
    program: Annotated[int, typer.Option(help="Which program of the kernel's grid.")] = 0,
    warp: Annotated[int | None, typer.Option(help="Only the rows of the query tile that this warp owns.")] = None,
    warps: Annotated[int, typer.Option(help="Warps that share the query tile.")] = 4,
    head: Annotated[int, typer.Option(help="Which query head (nsa-selected: which KV head).")] = 0,
    direction: Annotated[str, typer.Option(help="forward or backward.")] = "forward",
    order: Annotated[str | None, typer.Option(help="nsa-selected's loop order: lists (the default) or union.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "bf16",
    causal: Annotated[
        bool, typer.Option("--causal", help="With the causal mask; nsa operators and bsa always have theirs.")
    ] = False,
    targets: Annotated[int, typer.Option(help="hstu: how many tokens at the end are targets.")] = 0,
    context: Annotated[int, typer.Option(help="hstu: how many tokens at the start are the context.")] = 0,
    max_attn_len: Annotated[int, typer.Option(help="hstu: how far away keys may be; 0 for no limit.")] = 0,
    by_range: Annotated[
        bool, typer.Option("--range", "-r", help="Fill inputs by rule: element i of n is i/n, k negated.")
    ] = False,
    impl: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="Trace the kernel that this function launches.")
    ] = None,
    names: Annotated[str, typer.Option(metavar="S=qk,M=m_i,...", help="Which of its variables hold our values.")] = "",
    against: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Compare with this kernel's values, not with the simulation."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the values are written.")] = Path("debug"),
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with heat maps of every value.")
    ] = None,
) -> None:
    """See where inside a kernel it goes wrong: its values tile by tile against a simulation, and the first mismatch."""
    console = make_console()
    with wrong_usage_exits_with_2(console):
        # The others take no kernels of yours, and say so.
        check_words([operator], "trace", (impl, against) if operator == "flash" else ())
        interpret_where_no_gpu()
        from tilewise.trace.command import run_trace
        from tilewise.trace.request import Request

        pairs = [part.strip().partition("=") for part in names.split(",") if part.strip()]
        if not all(equals and value for _, equals, value in pairs):
            raise UsageError(f"--names {names}: expected NAME=VARIABLE pairs, such as S=qk,M=m_i")
        mapping = {name: value for name, _, value in pairs} or None
        fill = "range" if by_range else "random"
        tiles, place = (block_m, block_n, kernel_index, seq_blocks), (program, warp, warps, head)
        request = Request(operator, *tiles, *place, direction, order, dtype, causal, fill)
        request = replace(request, targets=targets, context=context, max_attn_len=max_attn_len)
        lines, agrees = run_trace(replace(request, impl=impl, names=mapping, against=against, out=out, html=html))
    for line in lines:
        console.print(line, markup=False, highlight=False)
    if not agrees:
        raise typer.Exit(1)


@app.command()
def sanity(
    operator: Annotated[
        str,
        typer.Argument(metavar="OP", help="The operator."),
    ],
    kernel: Annotated[int | None, typer.Option(metavar="I", help="Only configuration I.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Two tiles each way.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Mismatches by row, head and channel.")] = False,
    by_range: Annotated[
        bool, typer.Option("--range", "-r", help="Fill inputs by rule: element i of n is i/n, k negated.")
    ] = False,
    list_names: Annotated[bool, typer.Option("--list", help="List the configurations and what they take.")] = False,
) -> None:
    """The same as verify OP --every-config: every tile configuration against the reference."""
    _every_config(operator, kernel, small, diff, "range" if by_range else "random", list_names)


@app.command()
def bench(
    operator: Annotated[str, typer.Argument(metavar="OP", help="The operator.")],
    impl: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="Time this function next to ours; may be repeated."),
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only these baselines; may be repeated.")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A case by name; may be repeated.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="B=..,T=..", help="A case written out; may be repeated.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Some of fwd, bwd and fwd+bwd.")] = "fwd,bwd",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, fp16 or bf16; by default bf16 on a GPU, fp32 on a CPU.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Runs that do not count.")] = 10,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Runs that count; by default 100, or what fits two seconds, but at least 5."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save here, not as bench-OP-DEVICE.json in this folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw speed over length.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with tables and the plot.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Exit with 1 where a case is slower than in this run.")
    ] = None,
    tolerance: Annotated[str, typer.Option(help="By how much it may be slower.")] = "5%",
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Time without verifying, and say so in the result.")
    ] = False,
    no_save: Annotated[bool, typer.Option("--no-save", help="Save nothing, unless --json names a file.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="List cases and baselines.")] = False,
) -> None:
    """Time an operator against what a user would pick instead.

    Exit code 0; 1: something fails verify, or is slower than before; 2: wrong usage.
    """
    console = make_console()
    with wrong_usage_exits_with_2(console):
        check_words([operator], "bench", impl or ())
        interpret_where_no_gpu()
        from tilewise.bench.command import Request, list_cases, run_request

        if list_names:
            list_cases(operator, console)
            return
        modes = [name.strip() for name in mode.split(",")]
        what = impl or [], baseline or [], config or [], shape or [], modes
        choice = Request(operator, *what, dtype, warmup, iterations, json, plot, html, compare)
        command = shlex.join(["tilewise", *sys.argv[1:]])
        passed = run_request(
            replace(choice, tolerance=tolerance, unverified=unverified, save=not no_save, command=command), console
        )
    if not passed:
        raise typer.Exit(1)


app.add_typer(cli_machine.app)


def main() -> None:
    """Entry point of the console script."""
    app()
