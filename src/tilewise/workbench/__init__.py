"""Operators by name: one declaration holds what verify, trace, bench, inspect and warmup need of each."""

import importlib.util
import re
from pathlib import Path

from tilewise.workbench.operator import GROWTH, Operator, UsageError, did_you_mean, load

# Declarations, imported on first use.
OPERATORS = {
    "flash": "tilewise.workbench.flash:FLASH",
    "flash-hopper": "tilewise.workbench.flash:HOPPER",
    "flash-decode": "tilewise.workbench.flash:DECODE",
    "nsa": "tilewise.workbench.nsa:NSA",
    "nsa-compressed": "tilewise.workbench.nsa:COMPRESSED",
    "nsa-selected": "tilewise.workbench.nsa:SELECTED",
    "nsa-attend": "tilewise.workbench.nsa:ATTEND",
    "hstu": "tilewise.workbench.hstu:HSTU",
    "bsa": "tilewise.workbench.bsa:BSA",
    "hstu-bsa": "tilewise.workbench.bsa:HSTU_BSA",
}


def find(name: str, part: str = "suite") -> Operator:
    """The operator called `name`; where there is none, a UsageError lists those that have `part`."""
    if name not in OPERATORS:
        known = names(part)
        raise UsageError(
            f"there is no operator {name!r}: {did_you_mean(name, known)}expected one of {', '.join(known)}"
        )
    operator = load(OPERATORS[name])
    assert isinstance(operator, Operator)
    return operator


def names(part: str) -> list[str]:
    """The operators that have a part."""
    return [name for name in OPERATORS if find(name).has(part)]


def check_case(operator: Operator, text: str) -> None:
    """A UsageError where an operator has no case called `text`, found without the suite, which imports torch: cases are
    named by literals.
    """
    if "=" in text or text == GROWTH or not isinstance(operator.suite, str):
        return
    spec = importlib.util.find_spec(operator.suite.partition(":")[0])
    assert spec
    assert spec.origin
    source = Path(spec.origin).read_text(encoding="utf-8")
    if f'"{text}"' not in source:
        known = re.findall(r'\(\s*"([\w+-]+)",\s*"', source)
        raise UsageError(
            f"{operator.name}: there is no case {text!r}: {did_you_mean(text, known)}expected a name that tilewise"
            f" verify {operator.name} --list has, or a problem such as T=65,D=16"
        )
