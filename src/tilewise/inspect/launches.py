"""What an operator launches, collected without a GPU: each launch once, with the name of its problem."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise import workbench
from tilewise.inspect.compile import without_driver
from tilewise.ops._host.launching import Launch, capture
from tilewise.verify.implementation import accepted, check_signature, load_function
from tilewise.verify.result import Implementation
from tilewise.verify.suite import Case, Suite
from tilewise.workbench.operator import UsageError

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Labelled:
    """A launch of one problem or configuration, `label`; the same kernel may be launched there in several ways, `name`
    tells them apart.
    """

    label: str
    direction: Direction
    launch: Launch
    name: str


def captured(architecture: int, label: str, direction: Direction, run: Callable[[], Any]) -> list[Labelled]:
    """What `run` would launch on an architecture."""
    with capture(architecture) as launches:
        run()
    return label_once(label, direction, launches)


def label_once(label: str, direction: Direction, launches: Iterable[Launch]) -> list[Labelled]:
    """Launches that the compiler can tell apart, each once; the second of one kernel is called `kernel (2)`."""
    found: list[Labelled] = []
    seen: dict[str, int] = {}
    unique: dict[Any, Launch] = {}
    for launch in launches:
        unique.setdefault(_specialised(launch), launch)
    for launch in unique.values():
        kernel = launch.kernel.__name__
        seen[kernel] = seen.get(kernel, 0) + 1
        found.append(Labelled(label, direction, launch, kernel if seen[kernel] == 1 else f"{kernel} ({seen[kernel]})"))
    return found


def _specialised(launch: Launch) -> tuple[Any, ...]:
    # Launch options, such as warps, are no parameters: their values count, like those of constants.
    traits = {parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr}
    return launch.kernel.__name__, *(
        (name, _trait(value) if name in traits else repr(value)) for name, value in sorted(launch.arguments.items())
    )


def _trait(value: Any) -> Any:
    """What Triton specialises on for a non-constant argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if hasattr(value, "block_shape"):
        # A tensor descriptor, Triton's or Gluon's.
        return value.base.dtype, *value.block_shape
    if isinstance(value, tuple):
        return tuple(map(_trait, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return "float" if isinstance(value, float) else repr(value)


@contextlib.contextmanager
def recorded(architecture: int) -> Iterator[list[Launch]]:
    """Inside, no kernel runs: launches are collected, as for an architecture."""
    launches: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        # The autotuner's next configuration may set another tile shape of a descriptor.
        launches.append(
            Launch(
                kernel, 1, {name: copy.copy(x) if isinstance(x, TensorDescriptor) else x for name, x in values.items()}
            )
        )

    def tune(tuner: Any, *arguments: Any, **named: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, arguments, strict=False))
        for config in tuner.prune_configs(named):
            chosen = named | config.all_kwargs()
            if config.pre_hook:
                # It may set a descriptor's tile shape.
                config.pre_hook(tuner.nargs | chosen)
            tuner.fn.run(*arguments, **chosen)

    capability = mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(architecture, 10))
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Autotuner, "run", tune),
        capability,
        without_driver(architecture),
    ):
        yield launches


def implementation_launches(
    operator: str, implementation: str, case_name: str, architecture: int, dtype: torch.dtype
) -> list[Labelled]:
    """Forward and, where the function can be differentiated, backward. A UsageError says what is wrong with it."""
    suite: Suite = workbench.find(operator).load("suite")
    try:
        case = suite.find(case_name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    function = load_function(workbench.find(operator), Implementation(implementation, "cpu", external=True))
    check_signature(function, implementation, [case])
    failures: list[str] = []
    # Values of offsets and the like exist on the CPU only; numbers that no kernel computed would only mislead.
    for device in ("meta", "cpu"):
        try:
            found = case_launches(function, case, architecture, dtype, torch.device(device))
        except Exception as error:
            failures.append(
                f"on {device} tensors: {type(error).__name__}:"
                f" {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            continue
        if not found:
            raise UsageError(
                f"--impl {implementation}: it launches no Triton kernel for the case {case.name}, so there is nothing"
                " to compile"
            )
        return found
    raise UsageError(
        f"--impl {implementation}: it does not run with its kernels left out ({'; '.join(failures)}): "
        "let it take tensors of any device, and decide nothing by values that a kernel makes"
    )


def case_launches(
    function: Callable[..., Any],
    case: Case,
    architecture: int,
    dtype: torch.dtype,
    device: torch.device,
    collecting: Callable[[int], contextlib.AbstractContextManager[list[Launch]]] = recorded,
) -> list[Labelled]:
    """What a call with a case's inputs would launch, forward and, where it can be differentiated, backward; our own
    operators are collected from by `capture`, which takes tensors of any device.
    """
    problem = case.problem
    tensors = {name: _placed(x, dtype, device, problem.differentiable) for name, x in problem.tensors(_zeros).items()}
    leaves = [x for x in tensors.values() if x.requires_grad]
    # An operator's backward is observed as its forward was, so one list takes both.
    with collecting(architecture) as launches:
        results = function(**problem.arguments(tensors), **problem.options(), **accepted(function, problem.returning))
        forward = len(launches)
        outputs = [x for x in _tensors(results) if x.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs], allow_unused=True)
    return [
        *label_once(case.name, "forward", launches[:forward]),
        *label_once(case.name, "backward", launches[forward:]),
    ]


def _zeros(_name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _placed(x: torch.Tensor, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> torch.Tensor:
    """Strides are kept; integers keep their dtype."""
    if not x.is_floating_point():
        return x.to(device)
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    return (empty if device.type == "meta" else empty.zero_()).requires_grad_(requires_grad)


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [x for part in results for x in _tensors(part)] if isinstance(results, tuple | list) else []
