"""Registration of operators with torch, so that autograd, torch.compile and opcheck see through them; and the fast path
for plain eager calls.

torch.autocast is treated as torch's own scaled_dot_product_attention treats it.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import library

from tilewise.ops._host import backend, describe
from tilewise.ops._host.backend import actual
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.symbol import ALIGNMENT, Slot

if backend.HAS_TRITON:
    from tilewise.ops._host import template
    from tilewise.ops._host.program import Found, Planned, Program, Values

# What torch.ops has: the package's own name, which is another one where `kernels` loads it from the Hub.
NAMESPACE = __name__.partition(".")[0]
# Registrations live as long as the process.
_library = library.Library(NAMESPACE, "FRAGMENT")
# Calls per operator whose program is kept by all their metadata; beyond that the least recently used is evicted.
MOST_CALLS = 1024
# torch's own classes: a subclass may do anything.
PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_traced() -> bool:
    """Whether a compiler, a mode, a transform or an observer stands between a call and its kernels."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or backend.observed()
    )


def _is_plain() -> bool:
    """Whether nothing but autograd does, and neither a cast nor a check of values is asked for."""
    return not (
        _is_traced()
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled("cpu")
        or "TILEWISE_CHECK" in os.environ
    )


def _is_on_gpu(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


class _Saved:
    """Stands in for autograd's context where an operator is differentiated on slots."""

    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _value: bool) -> None:
        pass


class Operator:
    """What torch knows as `tilewise::<name>`; plain eager calls reach it without the dispatcher, which would cost 30 to
    100 µs each.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        function: type[torch.autograd.Function],
        programmed: type[torch.autograd.Function],
        tensors: tuple[int, ...],
        plan: Callable[..., Any] | None,
        differentiate: Callable[..., None],
        log: Callable[..., None] | None = None,
    ) -> None:
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.run = run
        self._function = function
        self._programmed = programmed
        self._tensors = tensors
        self._plan = plan
        self._differentiate = differentiate
        self._log = log
        # Programs by a call's metadata.
        self._calls: Kept[tuple[Program, Values]] = Kept(MOST_CALLS)
        # The plan after its argument checks, by the function that checks.
        self._planned: dict[Callable[..., Any], Planned] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Call as the schema says, all arguments by position."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.overload(*arguments)
        if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
            raise NotImplementedError(
                f"{self.overload} runs neither inside torch.func's transforms (vmap, grad, jvp, ...) nor in"
                " forward-mode differentiation: use backend='reference' there"
            )
        differentiate = False
        for position in self._tensors:
            x = arguments[position]
            if x is not None:
                if type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
                    if type(x) is Slot and self._plan is not None:
                        return self._plan(*arguments)
                    return self.overload(*arguments)
                differentiate = differentiate or x.requires_grad
        if differentiate and torch.is_grad_enabled():
            return self._function.apply(arguments, *(arguments[position] for position in self._tensors))
        return self.run(*arguments)

    def call_checked(self, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
        """Call with arguments that need no check but of values, tensors first: a backward's, where latency counts."""
        if torch.is_grad_enabled() or _is_traced() or "TILEWISE_CHECK" in os.environ:
            return self.call(given, numbers, _as_they_are)
        if not self._has_programs(given[0]):
            return self(*given, *numbers)
        key: list[Any] = [_as_they_are, *numbers]
        tensors = []
        for x in given:
            if x is None:
                key.append(None)
            elif x.__class__ in PLAIN:
                key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
                tensors.append(x)
            else:
                return self(*given, *numbers)
        key.append(given[0].device)
        found = self._calls.get(whole := tuple(key))
        if found is None:
            made = self._find(given, numbers, _as_they_are, False)
            if made is None:
                return self(*given, *numbers)
            found = self._calls.add(whole, (made.program, made.values))
        program, values = found
        return program.run(tensors, values)[0]

    def call(
        self, given: tuple[Any, ...], options: tuple[Any, ...], prepare: Callable[..., tuple[Any, ...] | None]
    ) -> Any:
        """Call with a user's arguments: tensors or None, and options.

        `prepare(*given, *options)` checks them and returns the operator's arguments, its tensors first and in the order
        of the given ones; None where the operator is not to be called, which is then returned. A plain eager call on a
        GPU is run by a program, whose decisions are the checks.
        """
        found = self._find_remembered(given, options, prepare) if _is_plain() and self._has_programs(given[0]) else None
        if found is None:
            arguments = prepare(*given, *options)
            return None if arguments is None else self(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in found.tensors):
            return self._programmed.apply(found, *given)
        return found.run()[0]

    def _find_remembered(
        self, given: tuple[Any, ...], options: tuple[Any, ...], prepare: Callable[..., Any]
    ) -> "Found | None":
        """A call's program; None where no program may run it."""
        # 1, True and 1.0 are equal, but not the same option.
        key: list[Any] = [os.environ.get("TILEWISE_BACKEND"), *options, *[_kind(x) for x in options]]
        tensors = []
        for x in given:
            if x is None:
                key.append(None)
            elif x.__class__ in PLAIN:
                key += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % ALIGNMENT)
                tensors.append(x)
            else:
                return None
        try:
            found = self._calls.get(whole := tuple(key))
        except TypeError:
            # An option that is not hashable, such as a list.
            return None
        if found is None:
            made = self._find(
                given, options, prepare, torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            )
            if made is None:
                return None
            found = self._calls.add(whole, (made.program, made.values))
        return Found(found[0], tensors, found[1])

    def forget(self) -> None:
        """Drop all programs: after a change of what a plan reads besides its arguments."""
        self._calls.clear()
        self._planned.clear()

    def _has_programs(self, first: Any) -> bool:
        return self._plan is not None and _is_on_gpu(first)

    def _find(
        self,
        given: tuple[Any, ...],
        options: tuple[Any, ...],
        prepare: Callable[..., tuple[Any, ...] | None],
        differentiated: bool,
    ) -> "Found | None":
        """The program of a call, and its arguments; None where the operator is not to be called, or not with
        Triton's kernels.
        """
        asked = (*given, *options, os.environ.get("TILEWISE_BACKEND"))
        planned = self._planned.get(prepare) or self._planned.setdefault(prepare, Planned(_after(prepare, self._plan)))  # type: ignore[arg-type]
        found = planned.known(asked)
        if found is None or self._log is not None:
            arguments = prepare(*given, *options)
            # The last argument of every operator is its backend.
            if arguments is None or arguments[-1] != "triton":
                return None
            if self._log is not None:
                self._log(*arguments)
        return found or planned.make(asked, lambda: self.launches(given, options, prepare, differentiated))

    def launches(
        self, given: tuple[Any, ...], options: tuple[Any, ...], prepare: Callable[..., Any], differentiated: bool
    ) -> list[Any]:
        """All that a call will launch, with slots in place of tensors; where it is differentiated its backward's
        launches too.
        """
        made = template.Template(given[0].device)
        arguments = prepare(*(None if x is None else made.given(x) for x in given), *options)
        output = self._plan(*arguments)  # type: ignore[misc]
        if differentiated:
            # A backward that raises does so where it is called.
            with contextlib.suppress(Exception):
                self._differentiate(arguments, output)
        return made.launches


def _after(prepare: Callable[..., Any], plan: Callable[..., Any]) -> Callable[..., Any]:
    """The plan of a user's arguments, which are checked and converted first: results and arguments.

    The last argument is the environment's.
    """

    def checked(*asked: Any) -> Any:
        arguments = prepare(*asked[:-1])
        return plan(*arguments), arguments

    return checked


def _kind(x: Any) -> Any:
    """An option's type; of a tuple, its items' types."""
    kind = x.__class__
    return tuple([y.__class__ for y in x]) if kind is tuple else kind


def _as_they_are(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def _autograd_functions(
    name: str,
    run: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    tensors: tuple[int, ...],
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """`apply(arguments, *tensors)`: all arguments in one, and again those that autograd must see. And
    `apply(found, *given)`, of a program.

    torch looks at every argument of apply several times, and where setup_context is a separate method also at
    forward's signature: with the schema's arguments one by one that took 60 µs.
    """

    def forward(ctx: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
        output = run(*arguments)
        setup_context(ctx, arguments, output)
        ctx.asked = backend.asked()
        return output

    def forward_by_program(ctx: Any, found: "Found", *_: Any) -> Any:
        output, arguments = found.run()
        ctx.asked = backend.asked()
        setup_context(ctx, arguments, output)
        return output

    def gradients(ctx: Any, *incoming: Any) -> Any:
        outgoing = backward(ctx, *incoming) if ctx.asked is None else ctx.asked.copy().run(backward, ctx, *incoming)
        return None, *(outgoing[position] for position in tensors)

    def make(forward: Callable[..., Any]) -> type[torch.autograd.Function]:
        return type(
            name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        )

    return make(forward), make(forward_by_program)


def _run_or_explain(
    name: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    plan: Callable[..., Any] | None,
    log: Callable[..., None] | None,
) -> Callable[..., Any]:
    """`run`; but an explained call records its template, and a logged one its line."""

    def run_or_explain(*arguments: Any) -> Any:
        found = backend.explained()
        if found is not None and plan is not None:
            found.templates.append((name, template.make(plan, arguments, arguments[0].device)))
            return fake(*arguments)
        if log is not None:
            log(*arguments)
        return run(*arguments)

    return run_or_explain


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    plan: Callable[..., Any] | None = None,
) -> Operator:
    """Define `tilewise::<schema>`, computed by `run` on every device; `fake` gives the outputs' shapes, strides and
    dtypes without data.

    `backward` and `setup_context` are as in torch's register_autograd; without them a derivative raises, saying so.
    `plan`, of the same arguments as `run`, computes the same with Triton's kernels, and may be given slots in place of
    tensors.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"

    def no_derivative(_ctx: Any, *_gradients: Any) -> Any:
        raise NotImplementedError(
            f"{qualified} has no derivative of its own (double backward): call the operator with"
            " backend='reference', which torch can differentiate any number of times"
        )

    def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward, setup_context = backward or no_derivative, setup_context or save_nothing
    known = torch._C.parse_schema(qualified + schema[len(name) :]).arguments
    log = describe.logged(name, [argument.name for argument in known], plan) if describe.LOGGING else None
    run = _run_or_explain(name, run, fake, plan, log)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(qualified, fake, lib=_library)
    if not any(argument.alias_info is not None and argument.alias_info.is_write for argument in known):
        # torch takes no formula for an operator that writes to its inputs: it says itself that there is no derivative.
        library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    tensors = tuple(position for position, argument in enumerate(known) if "Tensor" in str(argument.type))
    functions = _autograd_functions(name, run, backward, setup_context, tensors)

    def differentiate(arguments: tuple[Any, ...], output: Any) -> None:
        """The backward on slots, for the usual gradient in torch: of the first output alone, contiguous
        and aligned.
        """
        first, *others = output if isinstance(output, tuple) else (output,)
        ctx = _Saved()
        setup_context(ctx, arguments, output)
        backward(ctx, first.new_empty(first.shape), *(None,) * len(others))

    return Operator(name, run, *functions, tensors, plan, differentiate, log)


Function = TypeVar("Function", bound=Callable[..., Any])


def autocasting(function: Function) -> Function:
    """Inside torch.autocast, call `function` with its floating tensors in autocast's dtype (fp64 ones stay) and with
    autocast off.

    So what an operator computes in fp32 stays in fp32. The first tensor tells the device.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*arguments, **named)
        device = next((actual(x.device).type for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor)), "")
        # torch.compile before torch 2.12 cannot trace torch.amp.is_autocast_available.
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return function(*arguments, **named)
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            return (
                x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
            )

        with torch.autocast(device, enabled=False):
            return function(*map(cast, arguments), **{name: cast(x) for name, x in named.items()})

    return call  # type: ignore[return-value]


def uncompiled(function: Function) -> Function:
    """Inside torch.compile, call `function` as it stands, between two graphs: it launches kernels itself, and what it
    changes no schema says.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*arguments, **named)
        # Not as a decorator, which would import the compiler together with tilewise.
        return torch.compiler.disable(function)(*arguments, **named)

    return call  # type: ignore[return-value]
