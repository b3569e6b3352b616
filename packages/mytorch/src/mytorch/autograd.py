"""The dynamic graph: operations record their inputs as they run, and `backward` walks what they recorded."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from mytorch import backends
from mytorch.backends.base import Array, Backend, Shape
from mytorch.dtypes import is_float

if TYPE_CHECKING:
    from mytorch.tensor import Tensor

Backward = TypeVar("Backward", bound=Callable[..., Any])

_recording: contextvars.ContextVar[bool] = contextvars.ContextVar("recording", default=True)


class Recorded:
    """What operations take and give: the class of tensors, as far as the graph asks for it."""


@contextlib.contextmanager
def no_grad() -> Iterator[None]:
    """Inside, nothing is recorded: results require no gradient. Serves as a decorator too."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


def gives_new_memory(backward: Backward) -> Backward:
    """Marks a `_backward` each of whose gradients is new memory that nothing else holds or sees: a leaf then keeps it
    without a copy.

    The mark is the method's, not the class's: a subclass that returns its own gradients is not marked.
    """
    backward.gives_new_memory = True  # type: ignore[attr-defined]
    return backward


class Function:
    """The base of every operation. One instance is one application; options go into its constructor, tensors into
    `apply`.

    To add an operation, implement `_forward` and `_backward` on arrays of `self.backend` (see
    `mytorch.backends.base.Backend`):

        class Square(Function):
            def _forward(self, x):
                self.save(x)
                return self.backend.binary("mul", x, x)

            def _backward(self, grad):
                (x,) = self.saved
                return self.backend.binary("mul", grad, self.backend.binary("add", x, x))

        y = Square().apply(x)
    """

    backend: Backend
    inputs: tuple[Tensor, ...] = ()
    # For each input, whether its gradient is wanted: a costly one that is not need not be computed.
    needs: tuple[bool, ...] = ()
    _saved: tuple[Any, ...] | None = ()
    _versions: tuple[int, ...] = ()

    def _forward(self, *arrays: Array) -> Array:
        """The result, from the inputs' arrays."""
        torch_style = (
            ": torch's forward(ctx, x) and backward(ctx, grad) are _forward(self, x) and _backward(self, grad) here,"
            " save_for_backward is save"
        )
        raise NotImplementedError(
            f"{type(self).__name__} must implement _forward(self, *arrays)"
            + (torch_style if hasattr(self, "forward") else "")
        )

    def _backward(self, grad: Array) -> Array | tuple[Array | None, ...] | None:
        """The gradient of each input (None: none), from that of the result; shaped like the input or like what it was
        broadcast to.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement _backward(self, grad)")

    def save(self, *values: Any) -> None:
        """Keep what `_backward` will need, until the graph is freed."""
        self._saved = values

    @property
    def saved(self) -> tuple[Any, ...]:
        """What `save` kept."""
        if self._saved is None:
            raise RuntimeError(
                f"{type(self).__name__}'s saved inputs were released: run the forward pass again before another"
                " backward"
            )
        return self._saved

    def release_saved_inputs(self) -> None:
        """Forget what was kept and where it came from; this operation's backward cannot run after that."""
        self._saved, self.inputs = None, ()

    def apply(self, *inputs: Tensor) -> Tensor:
        """Run the operation, and record it where a gradient may be asked for."""
        if not isinstance(self, Function):
            raise TypeError(
                "apply was called on a class, as torch's is: here it belongs to an instance, which takes the options"
                " and holds what backward needs. Write MyFunction().apply(x), with options as MyFunction(2).apply(x)"
            )
        for x in inputs:
            if not isinstance(x, Recorded):
                raise TypeError(
                    f"{type(self).__name__} takes tensors, not {type(x).__name__}: wrap data with Tensor.create"
                )
            if x._device is not inputs[0]._device:
                where = ", ".join(f"{list(x.shape)} on {x.device}" for x in inputs)
                raise ValueError(
                    f"{type(self).__name__} needs tensors on one device, got {where}: move them with .to(device)"
                )
        if not inputs:
            raise ValueError(f"{type(self).__name__} needs tensors, got none")
        if "backend" in self.__dict__:
            raise RuntimeError(
                f"this {type(self).__name__} has been applied already: make another, for each holds what its own"
                " backward needs"
            )
        device = inputs[0]._device
        self.backend = backend = backends.of(device)
        recording = _recording.get()
        self.needs = tuple([recording and x._requires_grad for x in inputs])
        out = self._forward(*[x._data for x in inputs])
        if True in self.needs and is_float(backend.dtype(out)):
            self.inputs, self._versions = inputs, tuple([x._version for x in inputs])
            return inputs[0]._wrap(out, device, True, self)
        self._saved = None
        return inputs[0]._wrap(out, device)

    def backward(self, grad: Array) -> tuple[Array | None, ...]:
        """The gradient of each input, in its own shape and type: broadcasting is undone here, for every operation."""
        if self._saved is None:
            raise RuntimeError(
                f"the graph through {type(self).__name__} was freed by an earlier backward: run the forward pass again"
            )
        if tuple([x._version for x in self.inputs]) != self._versions:
            raise RuntimeError(
                f"an input of {type(self).__name__} was changed after it ran (by an optimiser's step, load_state_dict"
                " or its pointer): its gradient would be wrong. Go back through every graph before the change, or run"
                " the forward pass again"
            )
        found = self._backward(grad)
        gradients = found if isinstance(found, tuple) else (found,)
        if len(gradients) != len(self.inputs):
            raise RuntimeError(
                f"{type(self).__name__}._backward gave {len(gradients)} gradients for {len(self.inputs)} inputs"
            )
        return tuple(
            [
                self._fitted(g, x) if need and g is not None else None
                for g, x, need in zip(gradients, self.inputs, self.needs, strict=True)
            ]
        )

    def _fitted(self, grad: Array, x: Tensor) -> Array:
        """A gradient summed over the axes along which x was repeated, in x's type."""
        if grad.shape == x._data.shape and grad.dtype == x._data.dtype:
            return grad
        shape = tuple(grad.shape)
        if shape != x.shape:
            axes = repeated_axes(x.shape, shape)
            if axes is None:
                raise RuntimeError(
                    f"{type(self).__name__}._backward gave a gradient of shape {list(shape)} for an input of shape"
                    f" {list(x.shape)}"
                )
            grad = self.backend.reshape(self.backend.sum(grad, axes, True), x.shape)
        return self.backend.cast(grad, x.dtype)


def repeated_axes(narrow: Shape, broad: Shape) -> Shape | None:
    """The axes of broad along which narrow is repeated; None where it cannot be broadcast to it."""
    extra = len(broad) - len(narrow)
    if extra < 0 or any(a not in (1, b) for a, b in zip(narrow, broad[extra:], strict=True)):
        return None
    return tuple(i for i, b in enumerate(broad) if i < extra or (narrow[i - extra] == 1 and b != 1))


def _sorted(root: Function) -> list[Function]:
    """The operations that root's result came from, each before those that its inputs came from; without recursion, for
    graphs may be deep.
    """
    order: list[Function] = []
    seen = {root}
    stack = [(root, iter(root.inputs))]
    while stack:
        node, rest = stack[-1]
        for x in rest:
            if x._node is not None and x._node not in seen:
                seen.add(x._node)
                stack.append((x._node, iter(x._node.inputs)))
                break
        else:
            order.append(node)
            stack.pop()
    return order[::-1]


def run_backward(root: Tensor, grad: Array) -> None:
    """Add to the `grad` of every leaf that root came from, and free the graph."""
    if root._node is None:
        root._accumulate(grad)
        return
    waiting: dict[Function, Array] = {root._node: grad}
    for node in _sorted(root._node):
        arrived = waiting.pop(node, None)
        # Nothing arrives where every path from the root gave None.
        if arrived is not None:
            new = getattr(node._backward, "gives_new_memory", False)
            for x, g in zip(node.inputs, node.backward(arrived), strict=True):
                if g is None:
                    continue
                after = x._node
                if after is None:
                    x._accumulate(g, new)
                else:
                    # Always a new array: the one that came may be another tensor's gradient too.
                    waiting[after] = node.backend.binary("add", waiting[after], g) if after in waiting else g
        node.release_saved_inputs()
