"""Programs that run on the CPU: a launch of a compiled kernel is an interpreted one that finds its tensors by their
addresses.
"""

import ctypes
import weakref
from types import SimpleNamespace

import torch
from triton.runtime.jit import JITFunction

from tilewise.ops._host import program, start
from tilewise.ops._host.launching import Descriptor, Launch
from tilewise.ops._host.symbol import Slot, plain

CPU = torch.device("cpu")


class Memory:
    """All tensors that live: kernels may use no other memory."""

    def __init__(self):
        self._tensors = []

    def watch(self, x):
        self._tensors.append(weakref.ref(x))
        return x

    @property
    def alive(self):
        self._tensors = [one for one in self._tensors if one() is not None]
        return [one().untyped_storage() for one in self._tensors]

    def at(self, address, dtype):
        """All of the memory from an address on, up to the end of the tensor that it belongs to."""
        for storage in self.alive:
            rest = storage.data_ptr() + storage.nbytes() - address
            if 0 < rest <= storage.nbytes():
                flat = torch.frombuffer((ctypes.c_char * rest).from_address(address), dtype=torch.uint8)
                return flat[: rest - rest % dtype.itemsize].view(dtype)
        assert address == 0, "memory that is not there"
        return torch.empty(0, dtype=dtype)


class Interpreted:
    """In place of a compiled kernel, of a launch of slots."""

    def __init__(self, launch, memory):
        self._launch, self._memory = launch, memory

    def __getitem__(self, grid):
        return lambda *values: self._run(grid[0], values)

    def _run(self, grid, values):
        def tensor(slot, address):
            return self._memory.at(address, slot.dtype)

        arguments = dict(self._launch.arguments)
        given = zip([name for name in self._launch.kernel.arg_names if name in arguments], values, strict=True)
        for name, value in given:
            known = arguments[name]
            if isinstance(known, Descriptor):
                arguments[name] = Descriptor(
                    tensor(known.base, value.data_ptr()), tuple(value.shape), tuple(value.strides), known.block_shape
                )
            else:
                arguments[name] = record_like(known, value, tensor)
        program.run_all([Launch(self._launch.kernel, grid, {name: plain(x) for name, x in arguments.items()})], CPU)


def record_like(known, value, tensor):
    """A program passes records as plain tuples: with their names again, and tensors at addresses."""
    if isinstance(known, Slot):
        return tensor(known, value)
    if not isinstance(known, tuple):
        return value
    items = [record_like(x, y, tensor) for x, y in zip(known, value, strict=True)]
    return type(known)._make(items) if hasattr(known, "_make") else tuple(items)


def find_interpreted(memory):
    """In place of `start.find`. What a compiled kernel would be chosen by is decided too."""

    def find(launch):
        key, _ = start._key(compiled_form(launch), 0)
        plain(key)
        values = [launch.arguments[name] for name in launch.kernel.arg_names if name in launch.arguments]
        return start.Found(start.Kernel(Interpreted(launch, memory), None, ()), values)

    return find


def compiled_form(launch):
    """A launch of the kernel as Triton compiles it, where this process interprets."""
    kernel = launch.kernel
    if not hasattr(kernel, "params"):
        kernel = JITFunction(kernel.fn)
        kernel = SimpleNamespace(fn=kernel.fn, params=kernel.params)
    return Launch(kernel, launch.grid, launch.arguments)


def watching(function, memory):
    return lambda *arguments, **options: memory.watch(function(*arguments, **options))
