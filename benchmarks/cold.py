"""Times first calls with an empty kernel cache: each operator in processes of its own, and ranks that start at once.

python benchmarks/cold.py --json benchmarks/results/cold-h200.json
python benchmarks/cold.py --ranks 8     eight processes on one GPU, with one empty cache between them

Three processes an operator: one with an empty cache; one that compiles serially (TILEWISE_COMPILE_JOBS=1), with an
empty cache of its own, whose slowest kernel sets what is asked: 1.3 times its compile time plus 3 s for the first
forward and backward together; and one with the first one's full cache. Imports and the CUDA context come before the
clock. `python benchmarks/table.py FILE` prints a saved run again.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cold_child import OPERATORS
from harness import Run, need_gpu

HERE = Path(__file__).resolve().parent
# What is asked of a first step: so many times the slowest kernel, and so many seconds more.
TIMES_SLOWEST, SECONDS_MORE = 1.3, 3.0
TIMEOUT = 400.0
# The kernel that cold_child.py compiles first.
FIRST = "first_kernel"
NOW, BEFORE = "now", "before"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    names = ", ".join(OPERATORS)
    parser.add_argument("--only", nargs="+", choices=OPERATORS, default=list(OPERATORS), metavar="OPERATOR", help=names)
    parser.add_argument("--compare", type=Path, metavar="SRC", help="a src folder of another version, measured as well")
    parser.add_argument("--ranks", type=int, metavar="N", help="instead: N processes at once, with one empty cache")
    given = parser.parse_args()
    if given.compare and not (given.compare / "tilewise").is_dir():
        parser.error(f"{given.compare} has no folder tilewise: give the src folder of another version")
    return given


def child_environment(source: Path, cache: Path, log: Path, more: Mapping[str, str]) -> dict[str, str]:
    """What a child sees: its version of the sources, its kernel cache, and the log of what is compiled."""
    log.mkdir(parents=True, exist_ok=True)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join(map(str, filter(None, (HERE / "compile_log", source, inherited))))
    return {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(cache), "COMPILE_LOG": str(log), **more}


def compilations(log: Path) -> list[dict[str, Any]]:
    """What the processes of one run compiled and loaded for the operator, in order of time."""
    lines = (line for file in log.glob("*.jsonl") for line in file.read_text().splitlines())
    found = [one for one in map(json.loads, lines) if one["kernel"] != FIRST]
    return sorted(found, key=lambda one: one["at"])


def slowest(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The kernel that took longest to compile."""
    compiled = [one for one in events if not one["loaded"]]
    if not compiled:
        return {"kernel": "none", "seconds": 0.0}
    longest = max(compiled, key=lambda one: one["seconds"])
    return {"kernel": longest["kernel"], "seconds": round(longest["seconds"], 3)}


def kernels(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each kernel's compile times, a number a variant, the slowest kernel first."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for one in events:
        if not one["loaded"]:
            times[one["kernel"]].append(round(one["seconds"], 3))
    ordered = sorted(times.items(), key=lambda item: -max(item[1]))
    return [{"kernel": name, "seconds": sorted(seconds, reverse=True)} for name, seconds in ordered]


def times_compiled(events: Sequence[Mapping[str, Any]]) -> collections.Counter[str]:
    """How often each variant was compiled. Its name tells it from others, its hash from the variants of one kernel."""
    return collections.Counter(f"{one['kernel']} {one['hash'][:12]}" for one in events if not one["loaded"])


def figures(phases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of one process's phases; how many modules its calls imported, and from which packages most of them."""
    found: dict[str, Any] = {name: round(one["seconds"], 3) for name, one in phases.items()}
    found["step"] = round(phases["forward"]["seconds"] + phases["backward"]["seconds"], 3)
    modules = [name for one in phases.values() for name in one.get("imported", [])]
    packages = collections.Counter(".".join(name.split(".")[:2]) for name in modules)
    return found | {"imported": len(modules), "imported_from": dict(packages.most_common(5))}


def asked(seconds: float) -> float:
    """The longest first step, by the slowest kernel's compile time."""
    return round(TIMES_SLOWEST * seconds + SECONDS_MORE, 2)


def start(operator: str, environment: Mapping[str, str], *more: str) -> subprocess.Popen[str]:
    """A child."""
    command = [sys.executable, str(HERE / "cold_child.py"), operator, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(environment))


def finish(child: subprocess.Popen[str]) -> dict[str, Any]:
    """What a child printed; an error where it failed, or takes too long."""
    try:
        out, _ = child.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        child.kill()
        raise RuntimeError(f"a first call took more than {TIMEOUT:.0f} s") from None
    if child.returncode != 0:
        raise RuntimeError(f"a child ended with code {child.returncode}")
    return json.loads(out)


def operator_row(operator: str, version: str, source: Path, folder: Path) -> dict[str, Any]:
    """The three processes of one operator."""
    serially = {"TILEWISE_COMPILE_JOBS": "1"}
    runs: dict[str, tuple[str, dict[str, str], list[str]]] = {
        "cold": ("first", {}, []),
        # A kernel's own time, without what a process pays once.
        "serial": ("serial", serially, ["--after-first-kernel"]),
        "full": ("first", {}, []),
    }
    phases, events = {}, {}
    for name, (cache, more, words) in runs.items():
        log = folder / f"{name}-log"
        phases[name] = finish(start(operator, child_environment(source, folder / cache, log, more), *words))
        events[name] = compilations(log)
        print(f"    {name}: {figures(phases[name])}", flush=True)
    longest = slowest(events["serial"])
    after = phases["cold"]["backward"]["at"]
    return {
        "case": operator,
        "version": version,
        **{name: figures(one) for name, one in phases.items()},
        "slowest": longest,
        "asked": asked(longest["seconds"]),
        # Helpers may compile what no call has needed yet: what counts is what was compiled at all.
        "variants": len(times_compiled(events["cold"])),
        "compiled_after_the_first_step": sum(one["at"] > after and not one["loaded"] for one in events["cold"]),
        "compiled_with_a_full_cache": len(times_compiled(events["full"])),
        "kernels": kernels(events["serial"]),
    }


def wait_for(ready: Path, count: int, children: Sequence[subprocess.Popen[str]]) -> None:
    """Until so many children are ready."""
    deadline = time.monotonic() + TIMEOUT
    while len(list(ready.glob("ready-*"))) < count:
        if time.monotonic() > deadline or any(child.poll() for child in children):
            raise RuntimeError("not all ranks came to their start")
        time.sleep(0.01)


def ranks_row(operator: str, version: str, source: Path, folder: Path, count: int) -> dict[str, Any]:
    """`count` processes that make their first call at once."""
    log, meeting = folder / "log", folder / "meeting"
    meeting.mkdir()
    children = []
    try:
        for rank in range(count):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            more = {name: str(value) for name, value in names.items()}
            environment = child_environment(source, folder / "cache", log, more)
            children.append(start(operator, environment, "--meet", str(meeting)))
        wait_for(meeting, count, children)
        (meeting / "go").touch()
        phases = [finish(child) for child in children]
    finally:
        for child in children:
            child.kill()
    steps = [figures(one)["step"] for one in phases]
    found = times_compiled(compilations(log))
    seconds = {"last": max(steps)} | {f"rank {rank}": step for rank, step in enumerate(steps)}
    row = {"case": operator, "version": version, "ranks": count, "seconds": seconds}
    totals = {"variants": len(found), "compiled": found.total(), "most": max(found.values(), default=0)}
    return row | totals | {"times_compiled": dict(found.most_common())}


def versions(compare: Path | None) -> Iterator[tuple[str, Path]]:
    """The sources of each version."""
    import tilewise

    yield NOW, Path(tilewise.__file__).resolve().parents[1]
    if compare:
        yield BEFORE, compare.resolve()


def words(given: argparse.Namespace) -> str:
    """What repeats the run, without this machine's folders."""
    found = ["--only", *given.only] if len(given.only) < len(OPERATORS) else []
    found += ["--ranks", str(given.ranks)] if given.ranks else []
    return " ".join([*found, *(["--compare", "SRC"] if given.compare else [])])


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for."""
    result = Run("cold", given.json, words(given), cores=os.cpu_count())
    for operator in given.only:
        for version, source in versions(given.compare):
            result.begin(f"{operator}, {version}")
            # A helper may still write to the cache when its parent has ended.
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                try:
                    if given.ranks:
                        row = ranks_row(operator, version, source, Path(folder), given.ranks)
                    else:
                        row = operator_row(operator, version, source, Path(folder))
                except RuntimeError as error:
                    row = {"case": operator, "version": version, "error": str(error)}
                    print(f"    failed: {error}", flush=True)
            result.add(row)
    result.print_table()
    return result.document


def main() -> None:
    """Print a table, and save the figures as JSON on request."""
    given = arguments()
    print("cold: importing torch", flush=True)
    need_gpu()
    document = run(given)
    return sys.exit(1) if any("error" in row for row in document["rows"]) else None


if __name__ == "__main__":
    main()
