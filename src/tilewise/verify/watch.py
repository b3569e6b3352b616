"""Fresh memory under watch: every tensor that Python code allocates holds NaN until written, and has guards that show a write beyond its ends."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from tilewise.verify.problem import GUARD

# What torch calls fresh memory, and whether its contents are the caller's to write.
_FACTORIES = {
    torch: {"empty": True, "empty_like": True, "empty_strided": True, "zeros": False, "zeros_like": False, "full": False, "full_like": False},
    torch.Tensor: {"new_empty": True, "new_empty_strided": True, "new_zeros": False, "new_full": False},
}


class Watch:
    """Inside `with Watch() as watch`, allocations are watched, on all threads; `fill` is what unwritten memory holds."""

    def __init__(self, fill: float = torch.nan) -> None:
        self._fill = fill
        self._allocations: list[tuple[torch.Tensor, int, tuple[int, ...]]] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        for owner, names in _FACTORIES.items():
            for name, unwritten in names.items():
                original = getattr(owner, name)
                self._originals.append((owner, name, original))
                setattr(owner, name, self._watched(original, unwritten))
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)

    def overrun(self) -> str:
        """What was written beyond the ends of an allocation; empty where nothing was."""
        for memory, span, shape in self._allocations:
            if memory.untyped_storage().nbytes() != memory.numel() * memory.element_size():
                # Resized, by `out=` for one: its guards are gone with the memory that it had.
                continue
            bits = memory.view(torch.uint8).reshape(-1, memory.element_size())
            untouched = _pattern(memory, self._fill)[:1].view(torch.uint8)
            changed = (bits != untouched).any(-1)
            before, after = int(changed[:GUARD].sum()), int(changed[GUARD + span :].sum())
            if before or after:
                return f"{before} elements before and {after} after a tensor of shape {list(shape)} were written"
        return ""

    def _watched(self, original: Callable[..., torch.Tensor], unwritten: bool) -> Callable[..., torch.Tensor]:
        @functools.wraps(original)
        def allocate(*arguments: Any, **named: Any) -> torch.Tensor:
            fresh = original(*arguments, **named)
            return self._guard(fresh, unwritten) if _is_plain(fresh) and not named.get("pin_memory") and named.get("out") is None else fresh

        return allocate

    def _guard(self, fresh: torch.Tensor, unwritten: bool) -> torch.Tensor:
        shape, strides = fresh.shape, fresh.stride()
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if fresh.numel() else 0
        # The pattern is made from the fresh tensor by an operation that is not watched itself.
        memory = _pattern(fresh, self._fill).expand(span + 2 * GUARD).contiguous()
        values = fresh.detach().clone()
        with torch.no_grad():
            fresh.set_(memory.untyped_storage(), GUARD, shape, strides)
            if not unwritten:
                fresh.copy_(values)
        self._allocations.append((memory, span, tuple(shape)))
        return fresh


def _is_plain(x: torch.Tensor) -> bool:
    """Whether x is an ordinary tensor with memory of its own: not one that torch.compile or a fake mode traces with."""
    if type(x) is not torch.Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active() or x.numel() == 0:
        return False
    return x.layout == torch.strided and x.device.type in ("cpu", "cuda") and not x.is_complex() and x.dtype != torch.bool


def _pattern(x: torch.Tensor, fill: float) -> torch.Tensor:
    """One element of what unwritten memory of x's dtype holds: `fill`, or for integers the largest one."""
    value = fill if x.is_floating_point() else torch.iinfo(x.dtype).max if fill != 0 else 0
    return torch.scalar_tensor(value, dtype=x.dtype, device=x.device).reshape(1)
