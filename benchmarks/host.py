"""Times calls as called, in one run: the host's time of small ones, and long ones beside their CUDA graphs.

python benchmarks/host.py --json benchmarks/results/host-h200.json
python benchmarks/host.py --compare ../before/src     before and after in one run: versions take turns in each round

A batch is 200 calls without a synchronisation between them, with one before it and one after it; the contenders take
turns, the garbage collector is off, and the median of 30 rounds counts. Calls that are long on the GPU are fewer in a
batch, and their time counts until the GPU is idle. `python benchmarks/table.py FILE` prints a saved run again.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from rounds import Local, Remote, Session, measure, own_stdout, rounds_of, serve
from table import host_lines, missed

TOPICS = ("flash", "hstu", "bsa", "nsa", "new-shapes", "cnn")
NOW, BEFORE = "now", "before"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=TOPICS, metavar="TOPIC", help=", ".join(TOPICS))
    parser.add_argument("--compare", type=Path, metavar="SRC", help="a src folder of another version, measured as well")
    parser.add_argument("--rounds", type=int, help="in place of each case's own number, which is 30 for most")
    parser.add_argument("--calls", type=int, help="in a batch, in place of each case's own number, 200 for most")
    # How this script starts itself for one version.
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compare and not (given.compare / "tilewise").is_dir():
        parser.error(f"{given.compare} has no folder tilewise: give the src folder of another version")
    return given


def sessions(compare: Path | None) -> dict[str, Session]:
    """This process, or a process for each version."""
    if compare is None:
        from host_cases import cases

        return {NOW: Local(cases(), "cuda")}
    import tilewise

    sources = {NOW: Path(tilewise.__file__).parents[1], BEFORE: compare.resolve()}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    return {version: Remote(command, {"PYTHONPATH": import_path(source)}) for version, source in sources.items()}


def import_path(source: Path) -> str:
    """PYTHONPATH of the version whose tilewise is in `source`; its mytorch is next to that, or in it in older ones."""
    folders = (source, source.parent / "packages" / "mytorch" / "src", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(map(str, folders))


def command(given: argparse.Namespace) -> str:
    """What repeats the run, without this machine's folders."""
    words = ["python benchmarks/host.py"]
    words += ["--only", *given.only] if len(given.only) < len(TOPICS) else []
    for name in ("rounds", "calls"):
        words += [f"--{name}", str(getattr(given, name))] if getattr(given, name) else []
    words += ["--compare", "SRC"] if given.compare else []
    return " ".join(words)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases that were asked for."""
    from host_cases import cases
    from timing import environment, save

    wanted = [case for case in cases().values() if case.topic in given.only]
    started = sessions(given.compare)
    result: dict[str, Any] = {"kind": "host", "environment": environment(command(given)), "rows": []}
    began = time.monotonic()
    for number, case in enumerate(wanted, 1):
        print(f"[{number}/{len(wanted)}] {time.monotonic() - began:5.0f} s  {case.name}", flush=True)
        calls = given.calls or case.calls
        row = measure(case, started, calls, rounds_of(case, calls, given.rounds))
        result["rows"].append(row)
        for version, error in row.get("errors", {}).items():
            print(f"    {version} failed: {error}", flush=True)
        # What was measured is kept, whatever comes after it.
        save(result, given.json)
    for session in started.values():
        if isinstance(session, Remote):
            session.end()
    return result


def main() -> None:
    """Print a table, and save the figures as JSON on request."""
    given = arguments()
    if given.serve:
        answers = own_stdout()
        from host_cases import cases

        return serve(Local(cases(), "cuda"), sys.stdin, answers)
    print("host: importing torch", flush=True)
    import torch

    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    result = run(given)
    print("\n".join(host_lines(result)))
    late = missed(result)
    print(f"{len(late)} of the figures asked for were missed" + "".join(f"\n  {line}" for line in late))
    return sys.exit(1) if any("errors" in row for row in result["rows"]) else None


if __name__ == "__main__":
    main()
