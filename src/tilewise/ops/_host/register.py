"""Registration of operators with torch, so that autograd, torch.compile and opcheck see through them.

An operator is a pair: a forward with outputs that depend on nothing but its arguments, and a backward that is an operator itself.
"""

from collections.abc import Callable
from typing import Any

import torch

# Registrations live as long as the process.
_library = torch.library.Library("tilewise", "FRAGMENT")


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> Any:
    """Define `tilewise::<schema>`, computed by `run` on every device; `fake` gives the outputs' shapes, strides and dtypes without data.

    `backward` and `setup_context` are as in torch.library.register_autograd; without them a derivative raises, saying so. Returns the operator.
    """
    name = schema.split("(", 1)[0]
    qualified = f"tilewise::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)

    def no_derivative(_ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(
            f"tilewise::{name} has no derivative of its own (double backward): call the operator with backend='reference', which torch can "
            "differentiate any number of times"
        )

    torch.library.register_autograd(qualified, backward or no_derivative, setup_context=setup_context, lib=_library)
    return getattr(torch.ops.tilewise, name).default
