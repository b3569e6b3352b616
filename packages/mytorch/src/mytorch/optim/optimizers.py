"""Optimisers: parameters and what is remembered about each; the arithmetic is one operation of the backend
a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from mytorch import backends
from mytorch.backends.base import Array, Backend
from mytorch.tensor import Tensor


def check_numbers(optimizer: str, **numbers: float) -> None:
    """Refuse an option below 0."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{optimizer}'s {name} is a number of at least 0, not {number!r}")


class Optimizer:
    """What all optimisers share.

    A subclass names what it remembers for each parameter (shaped like it, 0 at first), and implements `_update`.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, remembered: tuple[str, ...] = ()) -> None:
        self.parameters = list({id(x): x for x in parameters}.values())
        if not self.parameters:
            raise ValueError(f"{type(self).__name__} got no parameters: give it model.parameters()")
        for i, x in enumerate(self.parameters):
            if not isinstance(x, Tensor) or not x.requires_grad or x._node is not None:
                raise ValueError(
                    f"{type(self).__name__}'s parameter {i} must be a tensor made with requires_grad=True, not"
                    f" computed, got {x!r}"
                )
        check_numbers(type(self).__name__, lr=lr)
        self.lr, self.remembered = lr, remembered
        self._steps = [0] * len(self.parameters)
        self._memory: list[dict[str, Tensor]] = [{} for _ in self.parameters]

    def _update(self, backend: Backend, x: Array, grad: Array, memory: dict[str, Array], step: int) -> None:
        """Change a parameter's array, and what is remembered about it, in place; step counts from 1."""
        raise NotImplementedError(f"{type(self).__name__} must implement _update")

    def step(self) -> None:
        """Change every parameter that has a gradient."""
        for i, (x, memory) in enumerate(zip(self.parameters, self._memory, strict=True)):
            if x.grad is None:
                continue
            self._steps[i] += 1
            for name in self.remembered:
                # A module may have been moved or converted since the last step.
                kept = (
                    memory[name].to(x.device).astype(x.dtype)
                    if name in memory
                    else Tensor.zeros(x.shape, dtype=x.dtype, device=x.device)
                )
                memory[name] = kept
            x._version += 1
            arrays = {name: value._data for name, value in memory.items()}
            self._update(backends.of(x.device), x._data, x.grad._data, arrays, self._steps[i])

    def zero_grad(self) -> None:
        """Clear every parameter's gradient."""
        for x in self.parameters:
            x.set_grad(None)

    def state_dict(self) -> dict[str, Any]:
        """A copy of what is remembered: `lr`, and for each parameter the number of its steps and NumPy
        arrays by name.
        """
        state = [
            {"steps": steps} | {name: x.numpy() for name, x in memory.items()}
            for steps, memory in zip(self._steps, self._memory, strict=True)
        ]
        return {"optimizer": type(self).__name__, "lr": self.lr, "parameters": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of an optimiser of the same kind over parameters of the same shapes; otherwise change
        nothing.
        """
        own = type(self).__name__
        if state.get("optimizer") != own:
            raise ValueError(f"expected the state of {own}, got that of {state.get('optimizer')!r}")
        entries = state["parameters"]
        if len(entries) != len(self.parameters):
            raise ValueError(f"the state is of {len(entries)} parameters, and this {own} has {len(self.parameters)}")
        wrong = [
            f"{name} of parameter {i} (expected {list(x.shape)}, got"
            f" {list(entry[name].shape) if name in entry else 'nothing'})"
            for i, (x, entry) in enumerate(zip(self.parameters, entries, strict=True))
            if entry["steps"]
            for name in self.remembered
            if name not in entry or tuple(entry[name].shape) != x.shape
        ]
        if wrong:
            raise ValueError(f"the state does not fit this {own}'s parameters: {'; '.join(wrong)}")
        memory = [
            {
                name: Tensor.create(entry[name], dtype=x.dtype, device=x.device)
                for name in self.remembered
                if entry["steps"]
            }
            for x, entry in zip(self.parameters, entries, strict=True)
        ]
        self.lr, self._steps, self._memory = state["lr"], [entry["steps"] for entry in entries], memory


class SGD(Optimizer):
    """Down the gradient; with momentum, down a sum of gradients of which `momentum` is kept at each step."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr, ("velocity",) if momentum else ())
        check_numbers("SGD", momentum=momentum, weight_decay=weight_decay)
        self.momentum, self.weight_decay = momentum, weight_decay

    def _update(self, backend: Backend, x: Array, grad: Array, memory: dict[str, Array], step: int) -> None:
        backend.sgd_(x, grad, memory.get("velocity"), self.lr, self.momentum, self.weight_decay)


class Adam(Optimizer):
    """Steps of about lr in every element: the mean of its gradients over the root of the mean of their squares.

    Decay adds to the gradient.
    """

    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr, ("first", "second"))
        check_numbers(type(self).__name__, eps=eps, weight_decay=weight_decay)
        if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{type(self).__name__}'s betas are two numbers from 0 to below 1, not {betas!r}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def _update(self, backend: Backend, x: Array, grad: Array, memory: dict[str, Array], step: int) -> None:
        backend.adam_(
            x,
            grad,
            memory["first"],
            memory["second"],
            step,
            self.lr,
            self.betas,
            self.eps,
            self.weight_decay,
            self.decoupled,
        )


class AdamW(Adam):
    """Adam whose weight decay shrinks the parameter itself, by `lr * weight_decay` of it a step."""

    decoupled = True

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)
