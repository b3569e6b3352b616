"""Registration of operators with torch, so that autograd, torch.compile and opcheck see through them."""

from collections.abc import Callable
from typing import Any

import torch

# Registrations live as long as the process.
_library = torch.library.Library("tilewise", "FRAGMENT")


class Operator:
    """What torch knows as `tilewise::<name>`; plain eager calls reach it without the dispatcher, which would cost 30 to 100 µs each."""

    def __init__(self, name: str, run: Callable[..., Any], function: type[torch.autograd.Function]) -> None:
        self.overload = getattr(torch.ops.tilewise, name).default
        self._run = run
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call as the schema says, all arguments by position."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.overload(*arguments)
        differentiate = False
        for x in arguments:
            if isinstance(x, torch.Tensor):
                if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
                    return self.overload(*arguments)
                differentiate = differentiate or x.requires_grad
        if differentiate and torch.is_grad_enabled():
            return self._function.apply(*arguments)
        return self._run(*arguments)


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Operator:
    """Define `tilewise::<schema>`, computed by `run` on every device; `fake` gives the outputs' shapes, strides and dtypes without data.

    `backward` and `setup_context` are as in torch.library.register_autograd; without them a derivative raises, saying so.
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
    torch.library.register_fake(qualified, fake, lib=_library)
    torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)

    def forward(ctx: Any, *arguments: Any) -> Any:
        # torch would call setup_context itself, but looks up forward's signature at every call to do so, which takes 50 µs.
        output = run(*arguments)
        setup_context(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return Operator(name, run, type(name, (torch.autograd.Function,), members))
