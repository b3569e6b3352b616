"""Prints a saved result as the table that a page shows: python benchmarks/table.py benchmarks/results/flash-h200.json

It takes what the scripts here and `tilewise bench` save. With --readme, the README's short table of flash attention.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# No call may get slower by more than this.
SLOWER = 1.03
# What flash attention is timed against, as its table calls it.
PEERS = {"cudnn": "cuDNN", "fa2": "FA-2", "flash-attn-4": "FA-4", "flash-attn-4-fixed": "FA-4 fixed"}
README_CASES = (
    "B 8, T 2048, H 16, D 128",
    "B 1, T 16384, H 16, D 128, causal",
    "B 8, T 2048, H 32, D 64, causal",
    "B 4, T 4096, H 16, D 192",
)
README_COLUMNS = {"tilewise": "tilewise", "cudnn": "cuDNN", "flash-attn-4": "FlashAttention-4"}
UNITS = (
    "milliseconds", "graph_milliseconds", "microseconds", "seconds", "mebibytes", "tokens_per_second", "speedup",
)  # fmt: skip


def figures(row: Mapping[str, Any], peers: Sequence[str]) -> list[str]:
    """TFLOP/s and the ratios of one direction: none to what does not take the shape."""
    return [f"{row['tflops']['tilewise']:.0f}", *(_number(row["ratio"].get(name), 2) for name in peers)]


def flash_lines(document: Mapping[str, Any]) -> list[str]:
    """A row a shape and mask: TFLOP/s forward and backward, each with its ratio to everything else that was timed."""
    rows = [row for row in document["rows"] if "direction" in row]
    directions = {"forward": rows[::2], "backward": rows[1::2]}
    peers = {
        direction: [name for name in PEERS if any(name in row["ratio"] for row in found)]
        for direction, found in directions.items()
    }
    columns = ["bf16"]
    for direction, names in peers.items():
        columns += [f"{direction} TFLOP/s", *(f"× {PEERS[name]}" for name in names)]
    cells = [
        [forward["case"], *figures(forward, peers["forward"]), *figures(backward, peers["backward"])]
        for forward, backward in zip(*directions.values(), strict=True)
    ]
    return markdown(columns, cells)


def readme_lines(document: Mapping[str, Any]) -> list[str]:
    """The cases of README_CASES: TFLOP/s of each, forward / backward (backward in a fixed order)."""
    found: dict[tuple[str, str], dict[str, float]] = {
        (row["case"], row["direction"]): row["tflops"] for row in document["rows"] if "direction" in row
    }
    cells = []
    for case in README_CASES:
        forward, backward = found[case, "forward"], found[case, "backward"]
        line = [f"{_number(forward.get(name), 0)} / {_number(backward.get(name), 0)}" for name in README_COLUMNS]
        cells.append([case, *line[:-1], f"{line[-1]} ({_number(backward.get('flash-attn-4-fixed'), 0)})"])
    return markdown(["bf16, TFLOP/s", *README_COLUMNS.values()], cells)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines."""
    rule = ["---"] * len(columns)
    return [f"| {' | '.join(cells)} |" for cells in (columns, rule, *rows)]


def _time(row: Mapping[str, Any], version: str, name: str) -> float | None:
    """Microseconds by the clock that counts in this case."""
    contenders = row["microseconds"].get(version, {})
    return contenders[name][row["clock"]] if name in contenders else None


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _kernels(row: Mapping[str, Any], version: str) -> list[int] | None:
    """Compiled and loaded from disk while the calls were timed, by all contenders together."""
    found = row["kernels"].get(version)
    return None if found is None else [sum(one[kind] for one in found.values()) for kind in ("compiled", "loaded")]


def host_lines(document: Mapping[str, Any]) -> list[str]:
    """A row a comparison: µs a call, the ratio and what is asked; with another version, its time too."""
    rows = document["rows"]
    before = any("before" in row["microseconds"] for row in rows)
    cells = []
    for row in rows:
        for one in row["compared"]:
            ours, other = _time(row, "now", one["ours"]), _time(row, "now", one["other"])
            line = [row["case"], _number(ours, 1), one["other"], _number(other, 1), _number(_over(ours, other), 2)]
            line.append("-" if one["asked"] is None else f"≤ {one['asked']:.2f}")
            earlier = _time(row, "before", one["ours"])
            cells.append(line + ([_number(earlier, 1), _number(_over(ours, earlier), 2)] if before else []))
        if row["compiles_nothing"]:
            now, earlier_count = _kernels(row, "now"), _kernels(row, "before")
            counts = ["-" if found is None else f"{found[0]} + {found[1]}" for found in (now, earlier_count)]
            line = [f"{row['case']}: kernels compiled + loaded", counts[0], "", "", "", "0 + 0"]
            cells.append(line + ([counts[1], ""] if before else []))
    columns = [
        "case",
        "ours µs",
        "baseline",
        "its µs",
        "ratio",
        "asked",
        *(["before µs", "now / before"] if before else []),
    ]
    return markdown(columns, cells)


def missed(document: Mapping[str, Any]) -> list[str]:
    """What was asked of host times and is not there, in words."""
    return [line for row in document["rows"] for line in _missed(row)]


def _missed(row: Mapping[str, Any]) -> Iterator[str]:
    for one in row["compared"]:
        ours = _time(row, "now", one["ours"])
        ratio = _over(ours, _time(row, "now", one["other"]))
        if one["asked"] is not None and (ratio is None or ratio > one["asked"]):
            yield f"{row['case']}: {_number(ratio, 2)} of {one['other']}, asked {one['asked']:.2f}"
    for name in dict.fromkeys(one["ours"] for one in row["compared"]):
        change = _over(_time(row, "now", name), _time(row, "before", name))
        if change is not None and change > SLOWER:
            yield f"{row['case']}: {change:.2f} of the time before"
    kernels = _kernels(row, "now")
    if row["compiles_nothing"] and kernels != [0, 0]:
        yield f"{row['case']}: kernels compiled and loaded: {kernels}"


def cold_lines(document: Mapping[str, Any]) -> list[str]:
    """A row an operator and version, and one for each start of several ranks."""
    starts = [
        [
            _version(row),
            f"{row['cold']['step']:.1f}",
            f"{row['slowest']['seconds']:.1f} ({row['slowest']['kernel']})",
            f"≤ {row['asked']:.1f}",
            f"{row['cold']['second']:.2f}",
            str(row["variants"]),
            str(row["cold"]["imported"]),
            f"{row['full']['step']:.2f}",
        ]
        for row in document["rows"]
        if "cold" in row
    ]
    columns = (
        "operator", "first forward + backward s", "slowest kernel s", "asked", "second call s", "kernels",
        "modules imported in calls", "first with a full cache s",
    )  # fmt: skip
    found = markdown(columns, starts) if starts else []
    ranks = [
        [
            _version(row),
            str(row["ranks"]),
            f"{row['seconds']['last']:.1f}",
            str(row["variants"]),
            str(row["compiled"]),
            str(row["most"]),
        ]
        for row in document["rows"]
        if "ranks" in row
    ]
    if ranks:
        columns = ("operator", "ranks", "s until all are done", "kernels", "compilations", "most of one kernel")
        found += [*([""] if found else []), *markdown(columns, ranks)]
    return found


def _version(row: Mapping[str, Any]) -> str:
    return row["case"] + (f", {row['version']}" if row["version"] != "now" else "")


def decode_lines(document: Mapping[str, Any]) -> list[str]:
    """A row a case: the memory's limit and each contender's µs; what share of the limit ours reaches."""
    rows = [row for row in document["rows"] if "graph_milliseconds" in row]
    names = list(dict.fromkeys(name for row in rows for name in row["graph_milliseconds"]))
    cells = [
        [
            row["case"],
            _number(1e3 * row["limit_milliseconds"], 0),
            *(_number(_over(row["graph_milliseconds"].get(name), 1e-3), 1) for name in names),
            f"{100 * row['share_of_limit']['tilewise']:.0f} %",
            _number(row["to_the_best_other"], 2),
        ]
        for row in rows
    ]
    columns = ["bf16, µs", "limit", *(PEERS.get(name, name) for name in names), "of the limit", "ours / best other"]
    found = markdown(columns, cells)
    for row in document["rows"]:
        if "microseconds" in row:
            found += [
                "",
                *markdown([row["case"], *row["microseconds"]], [["µs", *map(str, row["microseconds"].values())]]),
            ]
    return found


def plain_lines(document: Mapping[str, Any]) -> list[str]:
    """Any other document: a table for each unit and set of contenders, a row a case."""
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    for case, unit, figures in _measured(document):
        tables.setdefault((unit, *figures), []).append([case, *map(str, figures.values())])
    found: list[str] = []
    for columns, rows in tables.items():
        found += [*([""] if found else []), *markdown(columns, rows)]
    return found


def _measured(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Case, unit, and figures by contender."""
    if "operator" in document:
        medians: dict[str, dict[str, float]] = {}
        for row in document["rows"]:
            if row["times"]:
                found = medians.setdefault(f"{row['case']}, {row['mode']}", {})
                found[row["implementation"]] = round(row["times"]["median"], 3)
        for case, figures in medians.items():
            yield case, "milliseconds", figures
        return
    for row in document["rows"]:
        for unit in UNITS:
            if unit in row:
                yield row["case"], unit, row[unit]


LINES = {"flash": flash_lines, "host": host_lines, "cold": cold_lines, "decode": decode_lines}


def lines(document: Mapping[str, Any]) -> list[str]:
    """The table of a document, by the script that saved it."""
    return LINES.get(document.get("benchmark", ""), plain_lines)(document)


def table(path: Path) -> str:
    """The table of a saved document."""
    from tilewise.bench.result import load

    return "\n".join(lines(load(path)))


if __name__ == "__main__":
    if "--readme" in sys.argv:
        from tilewise.bench.result import load

        print("\n".join(readme_lines(load(Path(sys.argv[1])))))
    else:
        print(table(Path(sys.argv[1])))
