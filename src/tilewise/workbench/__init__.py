"""Operators by name: one declaration holds what verify, trace, bench, inspect and warmup need of each."""

from tilewise.workbench.operator import Operator, UsageError, load

# Declarations, imported on first use.
OPERATORS = {
    "flash": "tilewise.workbench.flash:FLASH",
    "flash-hopper": "tilewise.workbench.flash:HOPPER",
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
        raise UsageError(f"there is no operator {name!r}: expected one of {', '.join(names(part))}")
    operator = load(OPERATORS[name])
    assert isinstance(operator, Operator)
    return operator


def names(part: str) -> list[str]:
    """The operators that have a part."""
    return [name for name in OPERATORS if find(name).has(part)]
