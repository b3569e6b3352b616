"""Registration of operators with torch, so that autograd, torch.compile and opcheck see through them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import library

# Registrations live as long as the process.
_library = library.Library("tilewise", "FRAGMENT")


class Operator:
    """What torch knows as `tilewise::<name>`; plain eager calls reach it without the dispatcher, which would cost 30 to 100 µs each."""

    def __init__(self, name: str, run: Callable[..., Any], function: type[torch.autograd.Function], tensors: tuple[int, ...]) -> None:
        self.overload = getattr(torch.ops.tilewise, name).default
        self._run = run
        self._function = function
        self._tensors = tensors

    def __call__(self, *arguments: Any) -> Any:
        """Call as the schema says, all arguments by position."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.overload(*arguments)
        if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{self.overload} runs neither inside torch.func's transforms (vmap, grad, jvp, ...) nor in forward-mode differentiation: use "
                "backend='reference' there"
            )
        differentiate = False
        for position in self._tensors:
            x = arguments[position]
            if x is not None:
                if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
                    return self.overload(*arguments)
                differentiate = differentiate or x.requires_grad
        if differentiate and torch.is_grad_enabled():
            return self._function.apply(arguments, *(arguments[position] for position in self._tensors))
        return self._run(*arguments)


def _autograd_function(
    name: str, run: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None], tensors: tuple[int, ...]
) -> type[torch.autograd.Function]:
    """`apply(arguments, *tensors)`: all arguments in one, and again those that autograd must see.

    torch looks at every argument of apply several times, and where setup_context is a method of its own also at forward's signature:
    with the schema's arguments one by one that took 60 µs.
    """

    def forward(ctx: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
        output = run(*arguments)
        setup_context(ctx, arguments, output)
        return output

    def gradients(ctx: Any, *incoming: Any) -> Any:
        outgoing = backward(ctx, *incoming)
        return None, *(outgoing[position] for position in tensors)

    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(gradients)})


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Operator:
    """Define `tilewise::<schema>`, computed by `run` on every device; `fake` gives the outputs' shapes, strides and dtypes without data.

    `backward` and `setup_context` are as in torch's register_autograd; without them a derivative raises, saying so.
    """
    name = schema.split("(", 1)[0]
    qualified = f"tilewise::{name}"

    def no_derivative(_ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(
            f"tilewise::{name} has no derivative of its own (double backward): call the operator with backend='reference', which torch can "
            "differentiate any number of times"
        )

    def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward, setup_context = backward or no_derivative, setup_context or save_nothing
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(qualified, fake, lib=_library)
    library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    tensors = tuple(
        position
        for position, argument in enumerate(torch._C.parse_schema(qualified + schema[len(name) :]).arguments)
        if "Tensor" in str(argument.type)
    )
    return Operator(name, run, _autograd_function(name, run, backward, setup_context, tensors), tensors)
