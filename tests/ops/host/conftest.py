"""A kernel that no GPU runs, and programs that run on the CPU."""

from types import SimpleNamespace

import pytest
import torch
import triton
from fake_kernels import MADE_WITH, Kernel
from interpreted_programs import Memory, find_interpreted, watching

from tilewise.ops._host import program, register, start
from tilewise.ops._host import template as templates
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launching import Descriptor


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(start, "_kernels", Kept(64))
    monkeypatch.setattr(start, "_signatures", {})
    # Compiling side by side is not the matter here.
    monkeypatch.setattr(start, "_compile_expected", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    return Kernel()


@pytest.fixture
def encoded(kernel, monkeypatch):
    """What the driver was asked to encode, for a kernel whose x is a descriptor."""
    calls = []

    def encode(address, swizzle, size, kind, block, shape, strides, padding):
        calls.append((address, swizzle, size, kind, tuple(block), tuple(shape), tuple(strides), padding))
        return f"map {len(calls)}"

    utils = SimpleNamespace(fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    # Under the interpreter Triton's own refuses a tensor on the CPU.
    monkeypatch.setattr(Descriptor, "triton", lambda self: self)
    kernel.descriptors = (MADE_WITH,)
    return calls


@pytest.fixture
def on_the_cpu(monkeypatch, poisoned_memory):
    """Programs run tensors on the CPU, whose device has no number and no stream."""
    memory = Memory()

    def empty(shape, strides, dtype):
        return memory.watch(torch.empty_strided(shape, strides, dtype=dtype))

    def watch_computed(self, function, *rest):
        return computed(self, watching(function, memory), *rest)

    computed = templates.Template.compute
    monkeypatch.setattr(templates.Template, "compute", watch_computed)
    monkeypatch.setattr(start, "find", find_interpreted(memory))
    monkeypatch.setattr(templates, "EMPTY_STRIDED", empty)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(program.compiling, "expecting", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    # Else allocations would go one by one through torch's functions.
    torch.use_deterministic_algorithms(False)
    return memory


@pytest.fixture
def programmed(on_the_cpu, monkeypatch):
    """The same for operators: tensors on the CPU are taken to be a GPU's. The programs that are made."""
    made = []

    class Listed(program.Program):
        def __init__(self, template):
            super().__init__(template)
            made.append(self)
            run = self.run
            self.run = lambda tensors, values: run([on_the_cpu.watch(x) for x in tensors], values)

    monkeypatch.setattr(program, "Program", Listed)
    monkeypatch.setattr(register, "_is_on_gpu", lambda x: isinstance(x, torch.Tensor))
    return made
