"""Audits every operator's launches at sizes that fit no machine: 32-bit overflow, out-of-bounds accesses, grid limits.

Cases are calls on tensors with shapes and no memory: 10 million tokens, many heads, strides far apart. Of each launch
selected programs are interpreted, with every 32-bit number and every address checked.

Triton's interpreter is patched while a launch is audited: the process must do nothing else meanwhile.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton.language
from rich.console import Console
from rich.markup import escape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tilewise import workbench
from tilewise._interpreter_speed import operators_in_full
from tilewise.inspect.audit_memory import Table, VirtualMemory
from tilewise.interpreter import repair
from tilewise.ops._host.launching import Launch, capture


@dataclass(frozen=True)
class AuditResult:
    """One launch: its operator and kernel, the sizes in words, how many programs it has, and what is wrong with it."""

    operator: str
    kernel: str
    sizes: str
    programs: int
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong


def audit(operator_names: Sequence[str]) -> list[AuditResult]:
    """Audit the launches of operators, one process per part, as many at a time as there are cores.

    A UsageError names unknown ones.
    """
    audits: dict[str, tuple[str, ...]] = {name: workbench.find(name, "audit").load("audit") for name in operator_names}
    # Parts that operators share are audited once.
    parts = list(dict.fromkeys(part for found in audits.values() for part in found))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(parts, pool.map(_audit_part, parts), strict=True))
    return [
        AuditResult(name, entry["kernel"], entry["sizes"], entry["programs"], tuple(entry["wrong"]))
        for name in audits
        for part in audits[name]
        for entry in found[part]
    ]


def _audit_part(part: str) -> list[dict[str, Any]]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tilewise.inspect.audit_worker", part]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise RuntimeError(
            f"the audit of {part} did not end well (exit code {result.returncode}): {result.stderr.strip()[-2000:]}"
        )
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries


def print_audit(results: Sequence[AuditResult], console: Console) -> bool:
    """One line for each kernel and size, errors below it; returns whether all passed."""
    for result in results:
        mark = "[green]✓[/]" if result.passed else "[red]✗[/]"
        console.print(
            f"{mark} {result.operator} {result.kernel} [dim]{escape(result.sizes)}; {result.programs:,} programs[/]",
            highlight=False,
        )
        for line in result.wrong:
            console.print(f"    {line}", markup=False, highlight=False)
    failed = sum(not result.passed for result in results)
    verdict = (
        f"FAIL: {failed} of {len(results)} launches"
        if failed
        else f"PASS: all {len(results)} launches fit 32-bit numbers and grid limits"
    )
    console.print(verdict, highlight=False)
    return not failed


# Not a multiple of any tile.
TOKENS = 10_000_019
CHANNELS = 128
HEADS, KEY_HEADS = 256, 16
# Token stride, in elements, where a tensor is a slice of something wide, such as all layers' projections side by side.
FAR = 1 << 20
# Lengths of packed sequences.
LENGTHS = (3_000_017, 0, TOKENS - 3_000_017)


@dataclass(frozen=True)
class Case:
    """One call at a virtual size: in words, for which architecture, and the call."""

    sizes: str
    architecture: int
    call: Callable[[], object]

    def launches(self) -> list[Launch]:
        """Its launches: of each kernel, with each set of constants and optional arguments, the first and the last."""
        with capture(self.architecture) as found:
            self.call()
        ends: dict[Any, list[Launch]] = {}
        for launch in found:
            # Upper case is constexpr.
            constants = (repr(value) for name, value in sorted(launch.arguments.items()) if name.isupper())
            key = (launch.kernel.__name__, *constants, *_missing(launch.arguments.items()))
            ends[key] = [*ends.get(key, [])[:1], launch]
        return [launch for pair in ends.values() for launch in pair]


def _missing(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Optional arguments, and fields of records, that are not given."""
    for name, value in named:
        if value is None:
            yield name
        elif hasattr(value, "_asdict"):
            yield from (f"{name}.{field}" for field in _missing(value._asdict().items()))


def rows(heads: int, *, packed: bool = False, batch: int = 2, tokens: int = TOKENS, stride: int = 0) -> torch.Tensor:
    """[B, T, H, D], or packed [N, H, D], in bf16; `stride`, if given, is the elements from token to token."""
    sizes: tuple[int, ...] = (tokens, heads, CHANNELS)
    strides: tuple[int, ...] = (stride or heads * CHANNELS, CHANNELS, 1)
    if not packed:
        sizes, strides = (batch, *sizes), (strides[0] * tokens, *strides)
    return torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")


def gates(*, packed: bool) -> torch.Tensor:
    """A gate of each token and head."""
    return torch.empty((*(() if packed else (2,)), TOKENS, HEADS), dtype=torch.bfloat16, device="meta")


def named(count: int, *, packed: bool) -> torch.Tensor:
    """The blocks that each token and KV head names."""
    return torch.empty((*(() if packed else (2,)), TOKENS, KEY_HEADS, count), dtype=torch.int32, device="meta")


def offsets(packed: bool) -> torch.Tensor | None:
    """Of the packed sequences, where they are packed."""
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32) if packed else None


def in_words(packed: bool, far: bool = False, batch: int = 2, heads: int = HEADS) -> str:
    """What the tensors are."""
    many = (
        f"packed sequences of {', '.join(f'{length:,}' for length in LENGTHS)} tokens"
        if packed
        else f"{batch} x {TOKENS:,} tokens"
    )
    return f"{many}, {heads} heads of {CHANNELS}" + (f", {FAR:,} elements from token to token" if far else "")


def layouts() -> Iterator[tuple[str, int, bool, int]]:
    """In words, the architecture, packed or not, and the token stride: dense tensors with descriptors where there are
    any, the others without.
    """
    for architecture, packed, far in ((90, False, False), (80, False, True), (90, True, True)):
        yield in_words(packed, far), architecture, packed, FAR if far else 0


# A longer loop runs its first, middle and last step only: numbers that follow from the loop's own are largest at its
# ends.
MOST_STEPS = 3
MOST_PROGRAMS = 2**31 - 1
# The limit of a tensor descriptor: cuTensorMapEncodeTiled takes strides in bytes below this.
MOST_DESCRIPTOR_STRIDE = 2**40
OPERATIONS: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def limits(launch: Launch) -> list[str]:
    """What a launch asks for and no GPU offers."""
    wrong = (
        [f"a grid of {launch.grid:,} programs: no GPU launches more than {MOST_PROGRAMS:,}"]
        if launch.grid > MOST_PROGRAMS
        else []
    )
    for name, value in launch.arguments.items():
        if hasattr(value, "block_shape"):
            # A tensor descriptor, Triton's or Gluon's.
            stride = max(value.strides) * value.base.element_size()
            if stride >= MOST_DESCRIPTOR_STRIDE:
                wrong.append(
                    f"a descriptor of {name} with a stride of {stride:,} bytes: it must be below"
                    f" {MOST_DESCRIPTOR_STRIDE:,}"
                )
    return wrong


def can_interpret(launch: Launch) -> bool:
    """Whether there is an interpreter for the kernel: for Gluon's there is none."""
    return hasattr(launch.kernel, "rewrite")


def faults(launch: Launch, tables: Mapping[str, Table]) -> list[str]:
    """Errors of the first, the last and some programs in between, each once, with the kernel line."""
    found: dict[str, None] = {}

    def report(message: str) -> None:
        where = _kernel_line(sys._getframe())
        # One line fails in many programs: the first is enough.
        if not any(known.startswith(f"{where}: ") for known in found):
            found[f"{where}: {message}"] = None

    repair()
    memory = VirtualMemory(interpreter._interpreter, report)
    arguments = memory.place(launch.arguments, tables)
    programs = sorted({0, min(1, launch.grid - 1), launch.grid // 2, launch.grid - 1})
    virtual = _replaced(interpreter, "_interpreter", memory)
    with operators_in_full(), _checked_numbers(report), _sampled_loops(), _programs(programs, launch.grid), virtual:
        executor = _Executor(launch.kernel.rewrite(), launch.kernel.arg_names, (len(programs),))
        try:
            executor(**arguments)
        except interpreter.InterpreterError as error:
            # An earlier error may have caused it.
            found[f"the kernel cannot be interpreted to its end: {error}"] = None
    return list(found)


class _Executor(interpreter.GridExecutor):  # type: ignore[misc]
    """Arguments are passed through: addresses are not copied."""

    def _init_args_hst(self, args_dev: Any, kwargs: Any) -> Any:
        return args_dev, kwargs

    def _restore_args_dev(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _programs(programs: list[int], grid: int) -> Iterator[None]:
    """The executor walks a small grid; program i of it is `programs[i]` of `grid`."""
    builder = interpreter.interpreter_builder
    set_index, set_size = builder.set_grid_idx, builder.set_grid_dim
    with (
        _replaced(builder, "set_grid_idx", lambda x, y, z: set_index(programs[x], y, z)),
        _replaced(builder, "set_grid_dim", lambda x, y, z: set_size(grid, y, z)),
    ):
        yield


@contextlib.contextmanager
def _checked_numbers(report: Callable[[str], None]) -> Iterator[None]:
    """Sums, differences and products that overflow their type, except those with `sanitize_overflow=False`; and casts
    that truncate a number.
    """
    original = TritonSemantic.cast

    def check(_self: Any, x: Any, y: Any, operation: Any) -> None:
        kind = x.type.scalar
        if kind.int_bitwidth >= 64:
            return
        exact = OPERATIONS[operation.__name__](x.handle.data.astype(np.int64), y.handle.data.astype(np.int64))
        outside = exact[(exact > kind.get_int_max_value()) | (exact < kind.get_int_min_value())]
        if outside.size:
            report(f"{kind} overflows: {operation.__name__} gives {int(outside.flat[0]):,}")

    def cast(self: Any, x: Any, dtype: Any, *rest: Any) -> Any:
        kind, wanted = x.type.scalar, dtype.scalar
        result = original(self, x, dtype, *rest)
        if kind.is_int() and wanted.is_int() and 1 < wanted.int_bitwidth < kind.int_bitwidth:
            cut = x.handle.data[x.handle.data != result.handle.data]
            if cut.size:
                report(f"{kind} is cut to {wanted}: {int(cut.flat[0]):,} does not fit")
        return result

    with _replaced(TritonSemantic, "binary_op_sanitize_overflow_impl", check), _replaced(TritonSemantic, "cast", cast):
        yield


def _steps(*bounds: Any) -> Iterator[Any]:
    """A kernel's `range`: each step is a tensor, so that arithmetic with it is checked too; of a long loop the ends and
    the middle.
    """
    steps = range(*bounds)
    count = len(steps)
    chosen = range(count) if count <= MOST_STEPS else (0, count // 2, count - 1)
    return (interpreter._implicit_cvt(steps[i]) for i in chosen)


@contextlib.contextmanager
def _sampled_loops() -> Iterator[None]:
    """`range` in kernels is `_steps`."""
    scopes = [vars(module) for module in list(sys.modules.values()) if _is_device_code(vars(module))]
    for scope in scopes:
        scope["range"] = _steps
    try:
        yield
    finally:
        for scope in scopes:
            del scope["range"]


def _is_device_code(scope: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module with kernels: it imports the language as `tl`, as all of ours do."""
    return scope.get("tl") is triton.language and not str(scope.get("__name__")).startswith("triton.")


def _kernel_line(frame: FrameType | None) -> str:
    """File and line of the innermost call from device code."""
    while frame is not None:
        if _is_device_code(frame.f_globals):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
