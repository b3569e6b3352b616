"""What a simulated kernel does wrong, with the lines of the kernel that do it."""

import linecache
import sys
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = str(Path(__file__).parent)
# Callers that a message names, from the innermost on.
MOST_CALLERS = 4


class Line(NamedTuple):
    """A line of a kernel that is being executed."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number} {self.function}"


Lines = tuple[Line, ...]


class Stopped(BaseException):
    """Ends a thread after a fault elsewhere."""


class KernelFaultError(RuntimeError):
    """A kernel that is simulated on the CPU does what is wrong on a GPU, or uses what is not simulated.

    `kind` says in a few words what it is; `lines` are the kernel's lines that are involved, each with its callers.
    """

    def __init__(self, kind: str, message: str, *lines: Lines) -> None:
        super().__init__("\n    ".join((f"{kind}: {message}", *(shown(one) for one in lines if one))))
        self.kind = kind
        self.message = message
        self.lines = lines

    def __reduce__(self) -> Any:
        return type(self), (self.kind, self.message, *self.lines)


def executed() -> Lines:
    """The kernel's lines that are being executed, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    lines: list[Line] = []
    while not frame.f_code.co_filename.startswith(PACKAGE) and len(lines) < MOST_CALLERS:
        lines.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        if frame.f_back is None:
            break
        frame = frame.f_back
    return tuple(lines)


def shown(lines: Lines) -> str:
    """A line with its text and its callers."""
    if not lines:
        return "(no line of the kernel)"
    text = linecache.getline(lines[0].file, lines[0].number).strip()
    callers = "".join(f" < {line}" for line in lines[1:])
    return f"{lines[0]}: {text}{callers}"
