"""What `tilewise trace` is asked for, and its result."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.trace.values import Lines, Values
from tilewise.verify.single import DTYPES
from tilewise.workbench.operator import UsageError

# Fields of hstu's mask only.
HSTU_MASK = ("targets", "context", "max_attn_len")


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operator: str
    block_m: int | None = None
    block_n: int | None = None
    kernel_index: int | None = None
    seq_blocks: int = 2
    program: int = 0
    warp: int | None = None
    warps: int = 4
    head: int = 0
    direction: str = "forward"
    order: str | None = None
    dtype: str = "bf16"
    causal: bool = False
    fill: str = "random"
    seed: int = 42
    impl: str | None = None
    names: Mapping[str, str] | None = None
    against: str | None = None
    out: Path = Path("debug")
    html: Path | None = None
    targets: int = 0
    context: int = 0
    max_attn_len: int = 0

    @property
    def precision(self) -> torch.dtype:
        """The dtype, as torch has it."""
        return DTYPES[self.dtype]

    @property
    def device(self) -> torch.device:
        """Where the kernels run: interpreted on the CPU, else on the GPU."""
        return torch.device("cpu" if interpreting() else "cuda:0")


@dataclass(frozen=True)
class Traced:
    """One program of one kernel: its values, the simulation's, and the simulation's in fp64; `steps` of them, and where
    the program is.

    `order` is that in which the values of a step depend on each other. `at` is the head, first row and number of rows
    of a program that owns a tile of one head's queries; `turn` is what a step is called; `beside` is written out with
    both sides and not judged; `makers` adds to what explain knows. `unjudged` has, by name, the elements that the
    simulation masks and the kernel does not: it masks later, or elsewhere. A `fault` has ended the launch: values are
    those until then.
    """

    kernel_name: str
    part: str
    place: str
    kernel: Values
    simulation: Values
    exact: Values
    steps: int
    order: tuple[str, ...]
    lines: Lines = field(default_factory=dict)
    at: tuple[int, int, int] | None = None
    turn: str = "block"
    beside: Values = field(default_factory=dict)
    makers: Mapping[str, str] = field(default_factory=dict)
    unjudged: Values = field(default_factory=dict)
    fault: str = ""


def arrays(named: Iterable[tuple[str, torch.Tensor]]) -> Values:
    """As NumPy arrays, in the order in which they come."""
    return {name: x.detach().double().cpu().numpy() for name, x in named}


def split_step(name: str) -> tuple[str, int | None]:
    """`S_3` is S of step 3; what has no step has None."""
    base, _, step = name.rpartition("_")
    return (base, int(step)) if step.isdigit() else (name, None)


Entry = TypeVar("Entry")


def entry_of(request: Request, table: Sequence[Entry], *sizes: str) -> Entry | None:
    """The configuration that --kernel-index names, None if the option is not given.

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
    """Raise if a kernel could not have a tile of `block` rows."""
    if block < 16 or block & (block - 1):
        raise UsageError(f"{option(field)} {block}: expected a power of two of at least 16")
