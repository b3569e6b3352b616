"""A first training step of each operator in a process that compiles nothing, for tests/ops/host/test_compiling.py.

Prints as JSON, by operator: the kernels handed over to be compiled, a list a time; whether Triton's cache has the same
keys for launches of slots, as a first call compiles them, and for those that `tilewise warmup` collects.
"""

import hashlib
import json
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend

from tilewise import _warmup_worker, workbench
from tilewise.inspect.compile import without_driver
from tilewise.ops._host import backend, compiling, program, register, start, template
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.symbol import Slot, Trace, sample

CASES = {
    "flash": ("T=128,D=64,causal", "T=192,D=64,causal"),
    "hstu": ("lengths=128/64,D=32", "lengths=96/80,D=32"),
    "bsa": ("lengths=128/64,D=32", "lengths=96/80,D=32"),
    "nsa": ("T=256,H=16,Hk=1,D=64,count=4", "T=240,H=16,Hk=1,D=64,count=4"),
}
ARCHITECTURE = 90


def leaves(operator, case):
    (found,) = _warmup_worker.cases(operator, [case])
    zeros = found.problem.tensors(lambda _name, shape, _size: torch.zeros(shape, dtype=torch.bfloat16))
    tensors = {name: x.to("meta") for name, x in zeros.items()}
    return found, tensors


def step(operator, case):
    """As a user's, on tensors without data."""
    found, tensors = leaves(operator, case)
    wanted = [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
    results = workbench.find(operator).load("function")(**found.problem.arguments(tensors), **found.problem.options())
    output = results[0] if isinstance(results, tuple) else results
    torch.autograd.grad(output, wanted, torch.empty_like(output), allow_unused=True)


def make(self, arguments, expected):
    """A program that finds its kernels and runs none: its results have the plan's shapes."""
    made = template.make(self.plan, arguments, arguments[0].device, Trace())
    with compiling.expecting(expected):
        for launch in made.launches:
            start._find(launch, 0)

    def tensor(x):
        if isinstance(x, tuple):
            return tuple(tensor(y) for y in x)
        return torch.empty(sample(x.shape), dtype=x.dtype, device="meta") if isinstance(x, Slot) else sample(x)

    return program.Found(SimpleNamespace(run=lambda *_: tensor(made.result)), [], ())


def handed_over(operator):
    """Kernels, by hand-over, of a first step, the same again, and one of another shape."""
    times = []

    def compile_all(tasks, *_):
        times[-1].append(sorted(task.name for task in tasks))
        for task in tasks:
            task.compile()

    with (
        mock.patch.object(backend, "_check_triton"),
        mock.patch.object(register, "_is_on_gpu", return_value=True),
        mock.patch.object(program.Planned, "known", return_value=None),
        mock.patch.object(program.Planned, "make", make),
        mock.patch.object(compiling, "compile_all", compile_all),
        mock.patch.object(torch.cuda, "device"),
        without_driver(ARCHITECTURE),
        mock.patch.object(Launch, "compile", return_value=mock.MagicMock()),
        mock.patch.object(start, "_direct_launcher"),
    ):
        for case in CASES[operator]:
            times.append([])
            step(operator, case)
    return times


def cache_keys(launches):
    """Triton's, of the kernels that launches need."""
    found = set()

    def compile(source, target=None, options=None, _env_vars=None):
        compiler = make_backend(target)
        parsed = compiler.parse_options(dict(options or {}, **source.parse_options()))
        key = get_cache_key(source, compiler, parsed, env_vars=get_cache_invalidating_env_vars())
        found.add(f"{source.name} {hashlib.sha256(key.encode()).hexdigest()}")

    with mock.patch.object(triton.compiler, "compile", compile), without_driver(ARCHITECTURE):
        for launch in launches:
            launch.kernel.device_caches.clear()
            launch.compile()
            launch.kernel.device_caches.clear()
    return found


def of_slots(operator):
    """What a first step on a GPU compiles."""
    found = []

    def ask(self, given, options, prepare, _differentiated):
        found.append(self.launches(given, options, prepare, True))
        raise InterruptedError

    case, tensors = leaves(operator, CASES[operator][0])
    with (
        backend.as_if_on(ARCHITECTURE),
        mock.patch.object(register, "_is_on_gpu", return_value=True),
        mock.patch.object(register.Operator, "_find", ask),
        mock.patch.object(register, "_is_plain", return_value=True),
    ):
        try:
            workbench.find(operator).load("function")(**case.problem.arguments(tensors), **case.problem.options())
        except InterruptedError:
            return found[0]
    raise AssertionError("no problem was remembered")


if __name__ == "__main__":
    document = {}
    for operator in CASES:
        (case,) = _warmup_worker.cases(operator, [CASES[operator][0]])
        collected = _warmup_worker.launches(operator, case, torch.bfloat16, ARCHITECTURE, forward_only=False)
        slots, warmed = cache_keys(of_slots(operator)), cache_keys(collected)
        document[operator] = {"slots": sorted(slots), "warmed": sorted(warmed), "handed_over": handed_over(operator)}
    print(json.dumps(document))
