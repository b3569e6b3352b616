"""Tiles that a request asks for: of the operator's table, or by their sizes."""

from collections.abc import Sequence
from typing import TypeVar

from tilewise.trace.request import Request
from tilewise.workbench.operator import UsageError

Entry = TypeVar("Entry")


def entry_of(request: Request, table: Sequence[Entry], *sizes: str) -> Entry | None:
    """The configuration that --kernel-index names, None where there is no such option.

    It chooses `sizes`, which must then not be given.
    """
    if request.kernel_index is None:
        return None
    if any(getattr(request, size) for size in sizes):
        raise UsageError(f"--kernel-index and {', '.join(map(option, sizes))} both choose tiles: give one of them")
    if not 0 <= request.kernel_index < len(table):
        raise UsageError(
            f"there is no configuration {request.kernel_index}: expected 0 to {len(table) - 1}, as tilewise verify"
            " OP --every-config --list numbers them"
        )
    return table[request.kernel_index]


def option(field: str) -> str:
    """A request's field as the command line has it."""
    return f"--{field.replace('_', '-')}"


def check_tile(field: str, block: int) -> None:
    """Raise where a kernel could have no tile of `block` rows."""
    if block < 16 or block & (block - 1):
        raise UsageError(f"{option(field)} {block}: expected a power of two of at least 16")
