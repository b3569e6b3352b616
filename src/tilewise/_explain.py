"""`tilewise.explain`: which backend and which kernels a call takes, with which tiles, and why no faster ones."""

import contextlib
import contextvars
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tilewise
from tilewise.ops._host import backend, describe
from tilewise.ops._host.describe import Kernel as Kernel
from tilewise.ops.nsa.cache import NSACache
from tilewise.ops.nsa.cached.stored import Stored

# Per context; only `explain` reads it, so that calls run unchanged.
_architecture: contextvars.ContextVar[int | None] = contextvars.ContextVar("tilewise_explaining_on", default=None)
# The public operators.
OPERATORS = tuple(
    name for name, home in tilewise._HOME.items() if home.startswith("tilewise.ops.") and name != "NSACache"
)
WITHOUT_KERNELS = {
    "cpu": "tile by tile in torch on the CPU: no kernels",
    "reference": "plain torch, the definition: no kernels",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What one call would run; `print` it, or read its fields.

    Args:
        function: the operator's name.
        backend: `triton`, `cpu` or `reference`.
        why: what chose it: the argument, TILEWISE_BACKEND, or where the tensors are.
        architecture: compute capability as one number, 90 for an H100, whose tiles these are; None without kernels.
        interpreted: whether kernels are interpreted, on the CPU.
        forward: the kernels in order, those that are launched alike once, with how often: `name`, `grid`, `block_m`,
            `block_n`, `warps`, `stages`, `tma`, `gluon`, `times`.
        backward: the same; None where no tensor requires a gradient.
        reasons: why faster kernels, or faster ways to read tensors, were not taken:
            `backward of D 192 under softcap: portable kernels`.
        forward_bytes: the most memory that the forward holds at a time besides what it returns or keeps for the
            backward.
        backward_bytes: the same of the backward, besides gradients.
    """

    function: str
    backend: str
    why: str
    architecture: int | None
    interpreted: bool
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...] | None
    reasons: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int

    def __str__(self) -> str:
        where = "" if self.architecture is None else f", tiles of sm_{self.architecture}"
        lines = [
            f"{self.function}: backend {self.backend} ({self.why}){where}{', interpreted' if self.interpreted else ''}"
        ]
        if self.backend in WITHOUT_KERNELS:
            return "\n".join([*lines, f"  {WITHOUT_KERNELS[self.backend]}"])
        for name, kernels, size in (
            ("forward", self.forward, self.forward_bytes),
            ("backward", self.backward, self.backward_bytes),
        ):
            if kernels is None:
                lines.append(f"  {name}: no tensor requires a gradient")
            else:
                lines += [
                    f"  {name}, {_size(size)} of temporary memory:" if kernels else f"  {name}: nothing to launch"
                ]
                lines += _lines(kernels)
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def _lines(kernels: tuple[Kernel, ...]) -> list[str]:
    """In order; kernels that walk no tiles in stages, and come one after another, share a line."""
    lines: list[str] = []
    for tiled, some in itertools.groupby(kernels, lambda kernel: kernel.stages is not None):
        words = [str(x) if tiled else f"{x.name}{f' (x{x.times})' if x.times > 1 else ''}" for x in some]
        lines += words if tiled else [", ".join(words)]
    return [f"    {line}" for line in lines]


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


@contextlib.contextmanager
def explaining_on(architecture: int | str) -> Iterator[None]:
    """Inside, `explain` answers as if tensors were on another GPU, wherever they are. Calls are not changed.

    Args:
        architecture: its compute capability, `"sm_80"` or 80.

    It applies to this thread, or task, only.
    """
    digits = str(architecture).removeprefix("sm_")
    if isinstance(architecture, bool) or not digits.isdigit():
        raise ValueError(f"architecture is {architecture!r}: expected a compute capability such as 'sm_90' or 90")
    if int(digits) < 10 * backend.MINIMUM_CAPABILITY[0]:
        raise ValueError(f"architecture is {architecture!r}: tilewise's kernels need sm_80 or newer")
    token = _architecture.set(int(digits))
    try:
        yield
    finally:
        _architecture.reset(token)


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """What a call of one of tilewise's operators would run. Nothing runs, and no value of a tensor is read.

    Args:
        function: `flash_attention`, `flash_attention_with_kvcache`, `nsa_decode_step` or another operator.
        args, kwargs: what it would be called with. The backward is explained where a tensor requires a gradient, for
            an incoming gradient that is contiguous. Tensors on the `meta` device are taken to be on an H100 (sm_90);
            `explaining_on` chooses another architecture. `gate_model` of `hstu_attention_with_bsa` is not called: its
            gates are taken to be in q's dtype. Nor is the `compress` of an NSACache, whose own launches are not told;
            the cache stays as it is.

    Returns:
        An `Explanation`: the backend, kernels, tiles and grids, and the reasons why faster kernels were not taken.

    Arguments are checked as in the call, as far as that needs no values, and for `cpu` and `reference` up to the choice
    of the backend. It is safe to call while other threads run.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if name not in OPERATORS or not getattr(function, "__module__", "").startswith("tilewise.ops."):
        raise TypeError(f"function is {name}: expected one of tilewise's {', '.join(OPERATORS)}")
    stands = _StandIns()
    bound = inspect.signature(function).bind(*args, **kwargs)
    named = {key: stands.of(x) for key, x in bound.arguments.items()}
    if "gate_model" in named:
        named["gate_model"] = _gates
    pretended = _architecture.get() or (90 if stands.device.type == "meta" else None)
    found = backend.Explained(torch.device("cuda") if pretended else stands.device)
    with backend.explaining(found), backend.as_if_on(pretended) if pretended else contextlib.nullcontext():
        try:
            outputs = function(**named)
        except backend.Settled:
            return Explanation(name, found.backend, found.why, None, False, (), None, (), 0, 0)
        forward, found.templates = found.templates, []
        differentiable = [x for x in _tensors_in(outputs) if x.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.empty_like(x) for x in differentiable])
        architecture = backend.architecture(found.device)
    reasons = dict.fromkeys(
        note if note.startswith(direction) else f"{direction}: {note}"
        for direction, steps in (("forward", forward), ("backward", found.templates))
        for _, made in steps
        for note in made.notes
    )
    return Explanation(
        name,
        found.backend,
        found.why,
        architecture,
        found.device.type == "cpu",
        _kernels(forward),
        _kernels(found.templates) if differentiable else None,
        tuple(reasons),
        _scratch(forward),
        _scratch(found.templates),
    )


class _StandIns:
    """Tensors with the same metadata and no memory; each tensor always maps to the same one."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._made: dict[int, torch.Tensor] = {}

    def of(self, x: Any) -> Any:
        """In place of a tensor, or of a cache with its tensors; anything else is itself."""
        if isinstance(x, NSACache):
            cache = copy.copy(x)
            cache.stored = Stored(*map(self.of, x.stored))
            cache.device = cache.stored.lengths.device
            cache.compress = None if x.compress is None else _first_rows
            return cache
        if not isinstance(x, torch.Tensor):
            return x
        if not self._made:
            self.device = x.device
        if id(x) not in self._made:
            # Strides and alignment decide on kernels too.
            offset = 0 if x.device.type == "meta" else x.data_ptr() % 16 // x.element_size()
            made = torch.empty_strided((0,), (1,), dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), offset)
            self._made[id(x)] = made.requires_grad_(x.requires_grad)
        return self._made[id(x)]


def _first_rows(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of a learned compression of windows `[B, C, size, Hk, ·]`."""
    return k[:, :, 0], v[:, :, 0]


def _gates(padded_q: torch.Tensor) -> list[torch.Tensor]:
    """In place of a gate model."""
    return [padded_q.new_empty(padded_q.shape[:-1]).requires_grad_(padded_q.requires_grad) for _ in range(3)]


def _tensors_in(outputs: Any) -> list[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [x for output in outputs for x in _tensors_in(output)] if isinstance(outputs, tuple) else []


def _kernels(steps: list[tuple[str, Any]]) -> tuple[Kernel, ...]:
    return tuple(kernel for _, made in steps for kernel in describe.kernels_of(made))


def _scratch(steps: list[tuple[str, Any]]) -> int:
    return max((made.scratch_bytes for _, made in steps), default=0)
