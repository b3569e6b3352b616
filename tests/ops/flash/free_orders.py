"""Flash attention as on Hopper, simulated, whose blocks of keys add to dQ in a free order: implementations of it."""

from typing import Any

from tilewise import flash_attention, interpreter
from tilewise.ops._host import backend
from tilewise.ops.flash.hopper import launch
from tilewise.verify.implementation import SIMULATED_SMS


def opened(*arguments: Any, **options: Any) -> Any:
    """The first block zeroes the accumulators, the others follow in any order."""
    return _attend("opened", *arguments, **options)


def cleared(*arguments: Any, **options: Any) -> Any:
    """Another kernel has zeroed them."""
    return _attend("cleared", *arguments, **options)


def _attend(order: str, *arguments: Any, **options: Any) -> Any:
    def choose(inputs: Any, _deterministic: bool) -> str:
        # The kernels' own limits; they take short problems too, which the fixed order is faster for.
        fits = inputs.left is None and (order == "cleared" or inputs.group == 1)
        return order if fits else "fixed"

    # For good, since the backward runs after this returns: verify loads one function a process.
    launch.choose_order = choose
    with backend.as_if_on(90), backend.few_sms(SIMULATED_SMS), interpreter.written_barriers():
        return flash_attention(*arguments, **options, backend="triton", deterministic=False)
