"""Registration of operators with torch, so that autograd, torch.compile and opcheck see through them; and the short way of plain eager calls."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import library

from tilewise.ops._host import backend, describe
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.slot import Slot

if backend.HAS_TRITON:
    from tilewise.ops._host import compiling, template
    from tilewise.ops._host.template import Template

# Registrations live as long as the process.
_library = library.Library("tilewise", "FRAGMENT")
# Problems that an operator remembers; beyond, the least recently used one goes.
MOST_REMEMBERED = 1024
# Of torch's own classes: another one may be anything.
PLAIN = (torch.Tensor, torch.nn.Parameter)
ALIGNMENT = 16


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
    return not (_is_traced() or torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu") or "TILEWISE_CHECK" in os.environ)


class _Problem:
    """A call whose arguments have been checked: what runs it, for all tensors of the same metadata.

    The first call runs the plan itself: where every call has another shape, no template is made for nothing.
    """

    __slots__ = ("_differentiate", "_numbers", "_picks", "_plan", "_run", "_seen", "_template")

    def __init__(
        self,
        run: Callable[..., Any],
        plan: Callable[..., Any] | None,
        differentiate: Callable[..., None],
        given: tuple[Any, ...],
        arguments: tuple[Any, ...],
    ) -> None:
        self._run, self._plan, self._differentiate = run, plan, differentiate
        # Which of the given tensors each of the operator's first arguments is.
        self._picks = [_pick(i, x, given) for i, x in enumerate(arguments[: len(given)])]
        self._numbers = arguments[len(given) :]
        self._seen = False
        self._template: Any = None

    def arguments(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of the operator."""
        return *[None if at is None else given[at] for at in self._picks], *self._numbers

    def run(self, given: tuple[Any, ...], differentiated: bool = False) -> Any:
        """The operator's results."""
        if self._template is None:
            if self._plan is None:
                return self._run(*self.arguments(given))
            if not self._seen:
                self._seen = True
                with compiling.expecting(lambda: self.launches(given, differentiated)):
                    return self._plan(*self.arguments(given))
            self._template = self.make_template(given)
        return self._template.run([x for x in given if x is not None])

    def make_template(self, given: tuple[Any, ...]) -> "Template":
        """Of the operator's plan; each given tensor has a slot of its own, though two may be the same one."""
        template = Template(given[0].device)
        slots = tuple([None if x is None else template.given(x) for x in given])
        return template.finish(self._plan(*self.arguments(slots)))  # type: ignore[misc]

    def launches(self, given: tuple[Any, ...], differentiated: bool) -> list[Any]:
        """All that the call will launch, with slots in place of tensors; where it is differentiated its backward's launches too."""
        template = Template(given[0].device)
        arguments = self.arguments(tuple([None if x is None else template.given(x) for x in given]))
        output = self._plan(*arguments)  # type: ignore[misc]
        if differentiated:
            # A backward that raises does so where it is called.
            with contextlib.suppress(Exception):
                self._differentiate(arguments, output)
        return template.launches


def _is_in(x: Any, given: tuple[Any, ...]) -> bool:
    return any(x is y for y in given)


def _pick(i: int, x: Any, given: tuple[Any, ...]) -> int | None:
    """Each argument is the given tensor in its place, or stands in for one that was not given."""
    if x is None or x is given[i]:
        return None if x is None else i
    return next(j for j, y in enumerate(given) if y is x)


class _Saved:
    """Stands in for autograd's context where an operator is differentiated on slots."""

    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _value: bool) -> None:
        pass


class Operator:
    """What torch knows as `tilewise::<name>`; plain eager calls reach it without the dispatcher, which would cost 30 to 100 µs each."""

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        function: type[torch.autograd.Function],
        remembered: type[torch.autograd.Function],
        tensors: tuple[int, ...],
        plan: Callable[..., Any] | None,
        differentiate: Callable[..., None],
        log: Callable[..., None] | None = None,
    ) -> None:
        self.overload = getattr(torch.ops.tilewise, name).default
        self.run = run
        self._function = function
        self._remembered = remembered
        self._tensors = tensors
        self._plan = plan
        self._differentiate = differentiate
        self._log = log
        self._problems: Kept[_Problem] = Kept(MOST_REMEMBERED)

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
                    if type(x) is Slot and self._plan is not None:
                        return self._plan(*arguments)
                    return self.overload(*arguments)
                differentiate = differentiate or x.requires_grad
        if differentiate and torch.is_grad_enabled():
            return self._function.apply(arguments, *(arguments[position] for position in self._tensors))
        return self.run(*arguments)

    def call_checked(self, given: tuple[Any, ...], numbers: tuple[Any, ...]) -> Any:
        """Call with arguments that need no check but of values, tensors first: a backward's, which is in a hurry."""
        if torch.is_grad_enabled() or _is_traced() or "TILEWISE_CHECK" in os.environ:
            return self.call(given, numbers, _as_they_are)
        key: list[Any] = [*numbers]
        for x in given:
            if x is None:
                key.append(None)
            elif x.__class__ in PLAIN:
                key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
            else:
                return self(*given, *numbers)
        key.append(given[0].device)
        whole = tuple(key)
        problem = self._problems.get(whole) or self._remember(whole, given, (*given, *numbers))
        return problem.run(given)

    def call(self, given: tuple[Any, ...], options: tuple[Any, ...], prepare: Callable[..., tuple[Any, ...] | None]) -> Any:
        """Call with what a user gave: tensors or None, and options.

        `prepare(*given, *options)` checks them and returns the operator's arguments, its tensors first and in the order of the given ones; None
        where the operator is not to be called, which is then returned. A plain eager call with metadata that came before is not checked again.
        """
        if not _is_plain():
            arguments = prepare(*given, *options)
            return None if arguments is None else self(*arguments)
        # 1, True and 1.0 are equal, and not the same option.
        key: list[Any] = [os.environ.get("TILEWISE_BACKEND"), *options, *[_kind(x) for x in options]]
        differentiate = False
        for x in given:
            if x is None:
                key.append(None)
            elif x.__class__ in PLAIN:
                key += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % ALIGNMENT)
                differentiate = differentiate or x.requires_grad
            else:
                arguments = prepare(*given, *options)
                return None if arguments is None else self(*arguments)
        try:
            problem = self._problems.get(whole := tuple(key))
        except TypeError:
            # An option, such as a list, that is no key.
            arguments = prepare(*given, *options)
            return None if arguments is None else self(*arguments)
        if problem is None:
            arguments = prepare(*given, *options)
            if arguments is None:
                return None
            if any(x is not None and x is not y and not (y is None and _is_in(x, given)) for x, y in zip(arguments, given, strict=False)):
                # One of them was made here, such as a contiguous copy.
                return self(*arguments)
            problem = self._remember(whole, given, arguments)
        if differentiate and torch.is_grad_enabled():
            return self._remembered.apply(problem, *given)
        return problem.run(given)

    def forget(self) -> None:
        """Drop all problems: after a change of what a plan reads beside its arguments."""
        self._problems.clear()

    def _remember(self, key: tuple[Any, ...], given: tuple[Any, ...], arguments: tuple[Any, ...]) -> _Problem:
        """Each of the arguments is one of the given tensors, or no tensor."""
        if self._log is not None:
            self._log(*arguments)
        # The last argument of every operator is its backend. Values of offsets on the CPU are checked at each call, by `run`.
        templated = self._plan is not None and arguments[-1] == "triton" and given[0].device.type == "cuda"
        return self._problems.add(key, _Problem(self.run, self._plan if templated else None, self._differentiate, given, arguments))


def _kind(x: Any) -> Any:
    """An option's type; of a tuple, its items' types."""
    kind = x.__class__
    return tuple([y.__class__ for y in x]) if kind is tuple else kind


def _as_they_are(*arguments: Any) -> tuple[Any, ...]:
    return arguments


def _autograd_functions(
    name: str, run: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None], tensors: tuple[int, ...]
) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """`apply(arguments, *tensors)`: all arguments in one, and again those that autograd must see. And `apply(problem, *given)`.

    torch looks at every argument of apply several times, and where setup_context is a method of its own also at forward's signature:
    with the schema's arguments one by one that took 60 µs.
    """

    def forward(ctx: Any, arguments: tuple[Any, ...], *_: Any) -> Any:
        output = run(*arguments)
        setup_context(ctx, arguments, output)
        ctx.asked = backend.asked()
        return output

    def forward_again(ctx: Any, problem: _Problem, *given: Any) -> Any:
        output = problem.run(given, differentiated=True)
        ctx.asked = backend.asked()
        setup_context(ctx, problem.arguments(given), output)
        return output

    def gradients(ctx: Any, *incoming: Any) -> Any:
        outgoing = backward(ctx, *incoming) if ctx.asked is None else ctx.asked.copy().run(backward, ctx, *incoming)
        return None, *(outgoing[position] for position in tensors)

    def make(forward: Callable[..., Any]) -> type[torch.autograd.Function]:
        return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(gradients)})

    return make(forward), make(forward_again)


def _run_or_explain(
    name: str, run: Callable[..., Any], fake: Callable[..., Any], plan: Callable[..., Any] | None, log: Callable[..., None] | None
) -> Callable[..., Any]:
    """`run`; but a call that is explained leaves its template, and one that is logged its line."""

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
    """Define `tilewise::<schema>`, computed by `run` on every device; `fake` gives the outputs' shapes, strides and dtypes without data.

    `backward` and `setup_context` are as in torch's register_autograd; without them a derivative raises, saying so. `plan`, of the same
    arguments as `run`, computes the same with Triton's kernels, and may be given slots in place of tensors.
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
    known = torch._C.parse_schema(qualified + schema[len(name) :]).arguments
    log = describe.logged(name, [argument.name for argument in known], plan) if describe.LOGGING else None
    run = _run_or_explain(name, run, fake, plan, log)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(qualified, fake, lib=_library)
    library.register_autograd(qualified, backward, setup_context=setup_context, lib=_library)
    tensors = tuple(position for position, argument in enumerate(known) if "Tensor" in str(argument.type))
    functions = _autograd_functions(name, run, backward, setup_context, tensors)

    def differentiate(arguments: tuple[Any, ...], output: Any) -> None:
        """The backward on slots, of a gradient that lies as torch mostly has it: of the first output alone, contiguous and aligned."""
        first, *others = output if isinstance(output, tuple) else (output,)
        ctx = _Saved()
        setup_context(ctx, arguments, output)
        backward(ctx, first.new_empty(first.shape), *(None,) * len(others))

    return Operator(name, run, *functions, tensors, plan, differentiate, log)
