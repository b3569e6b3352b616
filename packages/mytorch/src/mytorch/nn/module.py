"""The base of every layer and model: it finds its tensors, moves, saves and shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from mytorch import backends, dtypes
from mytorch.device import Device
from mytorch.tensor import Tensor


def _held(value: Any, name: str) -> Iterator[tuple[str, Module | Tensor]]:
    """The modules and tensors that a value is or, as a list, tuple or dict, holds."""
    if isinstance(value, Module | Tensor):
        yield name, value
    elif isinstance(value, list | tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _held(part, f"{name}.{key}")


def _safetensors() -> Any:
    """The package, imported when a file is first read or written."""
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            "saving and loading a module needs the package safetensors: pip install safetensors"
        ) from None
    return safetensors


class Module:
    """A layer or a model. A subclass sets tensors and modules as attributes in its constructor, and implements
    `forward`.

        class Model(Module):
            def __init__(self):
                self.hidden, self.out = Linear(2, 8), Linear(8, 1)

            def forward(self, x):
                return self.out(self.hidden(x).relu())

    A tensor made with `requires_grad=True` is a parameter; one made without is state that no optimiser changes. Both
    are moved and saved. They are found in the order in which they were set, in lists, tuples and dicts too. Attributes
    that begin with `_` are left alone.
    """

    training = True

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The result, from the inputs."""
        raise NotImplementedError(f"{type(self).__name__} must implement forward(self, ...)")

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """What `forward` gives."""
        return self.forward(*inputs, **options)

    # What is in it.

    def _attributes(self) -> Iterator[tuple[str, Module | Tensor]]:
        """The modules and tensors directly in this one."""
        for name, value in vars(self).items():
            if not name.startswith("_"):
                yield from _held(value, name)

    def _tree(self, name: str, seen: set[int]) -> Iterator[tuple[str, Module | Tensor]]:
        """This and all modules and tensors in it, in order, each once and under the first name that leads to it."""
        seen.add(id(self))
        yield name, self
        for inner, part in self._attributes():
            place = f"{name}.{inner}" if name else inner
            if id(part) in seen:
                continue
            if isinstance(part, Module):
                yield from part._tree(place, seen)
            # A computed tensor is a result that the module keeps, not part of what it is.
            elif part._node is None:
                seen.add(id(part))
                yield place, part

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """This, under the empty name, and the modules in it, each once."""
        return ((name, part) for name, part in self._tree("", set()) if isinstance(part, Module))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and other state, each once."""
        return ((name, part) for name, part in self._tree("", set()) if isinstance(part, Tensor))

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that training changes, each once: `hidden.weight` is the weight of the attribute hidden."""
        return ((name, x) for name, x in self.named_tensors() if x.requires_grad)

    def parameters(self) -> Iterator[Tensor]:
        """The tensors that training changes, each once."""
        return (x for _, x in self.named_parameters())

    # What can be done with it.

    def to(self, device: Device | str) -> Self:
        """Move every tensor, with its gradient, to a device.

        The tensors stay the same objects, so an optimiser keeps its hold of them.
        """
        device = Device(device)
        for _, x in self.named_tensors():
            self._replace(x, x.to(device))
        return self

    def astype(self, dtype: Any) -> Self:
        """Convert every floating-point tensor, with its gradient, to another floating-point type.

        The tensors stay the same objects.
        """
        found = dtypes.check(dtype)
        if not dtypes.is_float(found):
            raise TypeError(
                f"a module's numbers stay floating point: expected float16, float32 or float64, got {found}"
            )
        for _, x in self.named_tensors():
            if dtypes.is_float(x.dtype):
                self._replace(x, x.detach().astype(found))
        return self

    def _replace(self, x: Tensor, by: Tensor) -> None:
        grad = x.grad
        x._data, x._device = by._data, by._device
        x._version += 1
        x.set_grad(None if grad is None else grad.to(by.device).astype(by.dtype))

    def train(self, training: bool = True) -> Self:
        """Behave as in training, here and in every module within: dropout drops."""
        for _, module in self.named_modules():
            module.training = training
        return self

    def eval(self) -> Self:
        """Behave as in use, here and in every module within: dropout does nothing."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Clear every parameter's gradient."""
        for x in self.parameters():
            x.set_grad(None)

    # Its state.

    def state_dict(self) -> dict[str, np.ndarray]:
        """A copy of every tensor, by name."""
        return {name: x.numpy() for name, x in self.named_tensors()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Take every tensor's values from a state of the same names and shapes, each in the type that is here;
        otherwise change nothing.
        """
        own = dict(self.named_tensors())
        missing, unexpected = [name for name in own if name not in state], [name for name in state if name not in own]
        wrong = [
            f"{name} (expected {list(x.shape)}, got {list(state[name].shape)})"
            for name, x in own.items()
            if name in state and tuple(state[name].shape) != x.shape
        ]
        found = (("missing", missing), ("unexpected", unexpected), ("wrongly shaped", wrong))
        if said := "; ".join(f"{what}: {', '.join(names)}" for what, names in found if names):
            raise ValueError(
                f"the state does not fit this {type(self).__name__}. {said}. Make the module as the one that was saved"
            )
        sources = {name: Tensor.create(state[name], dtype=x.dtype, device=x.device) for name, x in own.items()}
        for name, x in own.items():
            x._version += 1
            backends.of(x.device).copy_(x._data, sources[name]._data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a file in the safetensors format."""
        _safetensors().numpy.save_file(self.state_dict(), path)

    def load(self, path: str | os.PathLike[str]) -> Self:
        """Take the state from a file in the safetensors format, whoever wrote it; names and shapes must be those of
        this module.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file} to load from: save() writes one")
        package = _safetensors()
        try:
            state = package.numpy.load_file(file)
        except package.SafetensorError as error:
            raise ValueError(f"{file} is not a file in the safetensors format, or is damaged: {error}") from error
        self.load_state_dict(state)
        return self

    # How it looks.

    def options(self) -> str:
        """What stands in the parentheses of the repr: the sizes and options of a layer."""
        return ""

    def __repr__(self) -> str:
        lines = [
            f"  {name}: {part!r}".replace("\n", "\n  ") for name, part in self._attributes() if isinstance(part, Module)
        ]
        return f"{type(self).__name__}({self.options()}" + ("\n" + "\n".join(lines) + "\n" if lines else "") + ")"
