"""A process that compiles for one architecture: `python -m tilewise.inspect.worker`, where kernels are not interpreted.

It reads the request, a line of JSON, and answers with the list of kernels; then it reads numbers and answers with that
kernel's row.
"""

import dataclasses
import json
import os
import sys
from typing import Any

from tilewise import workbench
from tilewise.inspect.compile import inspect_launch
from tilewise.inspect.facts import Row, Wanted
from tilewise.inspect.launches import Labelled, implementation_launches
from tilewise.ops.flash.configs import family
from tilewise.verify.single import DTYPES
from tilewise.workbench.operator import Launches, UsageError

# Lines of a compiler error that are worth showing.
MOST_LINES = 3


def wanted_launches(wanted: Wanted, architecture: int) -> list[tuple[str, Labelled]]:
    """Every requested launch, with its operator, each label once: one operator may be part of another."""
    found: dict[tuple[str, str, str], tuple[str, Labelled]] = {}
    only = dict(wanted.only).get(architecture)
    for operator in wanted.operators:
        for one in _of_operator(wanted, operator, architecture):
            narrow = architecture in wanted.wide and "D 64" in one.label
            asked = only is None or one.label in only
            if wanted.direction in ("", one.direction) and asked and not narrow:
                found.setdefault((operator, one.label, one.direction + one.name), (operator, one))
    return list(found.values())


def _of_operator(wanted: Wanted, name: str, architecture: int) -> list[Labelled]:
    dtype = DTYPES[wanted.dtype]
    if wanted.impl:
        return implementation_launches(name, wanted.impl, wanted.case, architecture, dtype)
    operator = workbench.find(name)
    launches: Launches = operator.load("launches")
    found = launches.defaults(architecture, dtype) if wanted.config is None else []
    if wanted.config is None and (not wanted.every or launches.configuration is None):
        return found
    entries: list[Any] = list(enumerate(operator.load("configs").entries()))
    if wanted.config is None:
        # Those that are chosen on a card of this family.
        entries = [
            (i, entry)
            for i, entry in entries
            if family(architecture) in entry.families and entry.element_size == dtype.itemsize
        ]
    elif not 0 <= wanted.config < len(entries):
        numbers = f"0 to {len(entries) - 1}, as tilewise verify {name} --every-config --list numbers them"
        raise UsageError(f"there is no configuration {wanted.config}: expected {numbers}")
    else:
        entries = [entries[wanted.config]]
        if entries[0][1].element_size != dtype.itemsize:
            other = "fp32" if entries[0][1].element_size == 4 else "bf16"
            raise UsageError(
                f"configuration {wanted.config}, {entries[0][1].short}, is not for {wanted.dtype}: add --dtype {other}"
            )
    assert launches.configuration is not None
    return found + [
        one for i, entry in entries for one in launches.configuration(entry, f"{i} {entry.short}", architecture, dtype)
    ]


def row(operator: str, one: Labelled, architecture: int, wanted: Wanted) -> Row:
    """The result of one launch."""
    place = architecture, operator, one.label, one.direction, one.name
    try:
        inspected = inspect_launch(one.launch, architecture, wanted.mix, wanted.sass)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return Row(*place, None, f"{type(error).__name__}: {' '.join(lines[:MOST_LINES])}")
    return Row(*place, inspected.facts, inspected.trouble, inspected.sass)


def main() -> None:
    """Answer on the original standard output; what anything else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(document: Any) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    request = json.loads(sys.stdin.readline())
    architecture = request.pop("architecture")
    wanted = Wanted(**request)
    try:
        found = wanted_launches(wanted, architecture)
    except UsageError as error:
        answer({"usage": str(error)})
        return
    answer(
        {
            "found": [
                dataclasses.asdict(Row(architecture, operator, one.label, one.direction, one.name, None))
                for operator, one in found
            ]
        }
    )
    for line in sys.stdin:
        operator, one = found[int(line)]
        answer(row(operator, one, architecture, wanted).as_json())


if __name__ == "__main__":
    main()
