"""Starting compiled kernels: which one a launch needs, and Triton's launcher called directly.

Triton binds and specialises every argument at each launch, some 40 µs for ours. Here that is done once for each launch
of a program, which then calls the launcher that Triton made.
"""

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from tilewise.ops._host import compiling
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launching import Descriptor, Launch
from tilewise.ops._host.symbol import ALIGNMENT, Slot, Symbol, plain

# Compiled kernels by what Triton specialises a launch on; beyond this many the least recently used is evicted.
MOST_COMPILED = 4096
# Encoded descriptors that a launch keeps, by address.
MOST_ENCODED = 64


class _Signature:
    """A kernel's parameters: constants, whose values count, and arguments, with whether Triton looks at a whole
    number's value.
    """

    def __init__(self, kernel: Any) -> None:
        self.values = operator.itemgetter(*(x.name for x in kernel.params))
        constants = [x.name for x in kernel.params if x.is_constexpr]
        self.constants: Callable[[Mapping[str, Any]], Any] = (
            operator.itemgetter(*constants) if constants else lambda _: ()
        )
        self.defaults = {x.name: x.default for x in kernel.params if x.has_default}
        self.arguments = [(i, not x.do_not_specialize) for i, x in enumerate(kernel.params) if not x.is_constexpr]


class Direct(NamedTuple):
    """Triton's launcher without what it does in Python at each launch:
    `launch(grid, 1, 1, stream, *before, *arguments)`.

    If `listed`, the arguments are passed as one list. They are the kernel's, with a descriptor's encoded form, shape
    and strides in its place.
    """

    launch: Callable[..., None]
    before: tuple[Any, ...]
    listed: bool


class Kernel(NamedTuple):
    """A compiled kernel; how it is launched, None where only Triton can; and how the descriptors among its arguments
    are encoded.
    """

    compiled: Any
    direct: Direct | None
    encoders: tuple["Encoder", ...]


class Found(NamedTuple):
    """The compiled kernel that a launch needs, and its arguments in the kernel's order."""

    kernel: Kernel
    values: list[Any]


_signatures: dict[Any, _Signature] = {}
_kernels: Kept[Kernel] = Kept(MOST_COMPILED)
_loading = threading.Lock()
# What Triton has compiled in this process, launched or not yet.
_compiled: Kept[bool] = Kept(MOST_COMPILED)


def _trait(value: Any, specialised: bool) -> Any:
    """What Triton specialises on in a number, or in a tuple or record of them."""
    try:
        return _trait_of_plain(value, specialised)
    except TypeError:
        # For symbols, each test here is a decision.
        if isinstance(value, tuple):
            return tuple([_trait(x, True) for x in value])
        return _trait_of_number(value, specialised)


def _trait_of_number(value: Any, specialised: bool) -> Any:
    symbolic = value.__class__ is Symbol
    if symbolic and value.value.__class__ is float:
        return float
    narrow = value.is_narrow() if symbolic else -(2**31) <= value < 2**31
    return (narrow, value == 1, value % ALIGNMENT == 0) if specialised else narrow


@functools.lru_cache(maxsize=4096, typed=True)
def _trait_of_plain(value: Any, specialised: bool) -> Any:
    kind = value.__class__
    if kind is int:
        return _trait_of_number(value, specialised)
    if isinstance(value, tuple):
        # Inside a tuple Triton specialises every number, even where the parameter says not to.
        return tuple([_trait_of_plain(x, True) for x in value])
    return kind if value is None or kind is float else (kind, value)


def _key(launch: Launch, device: int) -> tuple[tuple[Any, ...], list[Any]]:
    """The key of the compiled kernel that a launch needs; and the arguments in the kernel's order, an
    address in place of each tensor.

    The key holds at least what Triton specialises on, and never the value of a number that is not a constant.
    """
    function, arguments = launch.kernel.fn, launch.arguments
    signature = _signatures.get(function)
    if signature is None:
        signature = _signatures[function] = _Signature(launch.kernel)
    if signature.defaults:
        # An argument that is not passed takes its default.
        arguments = {**signature.defaults, **arguments}
    values = list(signature.values(arguments))
    option = arguments.get
    key = [
        function, device, option("num_warps"), option("num_stages"), option("maxnreg"), option("enable_fp_fusion"),
        signature.constants(arguments),
    ]  # fmt: skip
    for i, specialised in signature.arguments:
        value = values[i]
        kind = value.__class__
        if kind is int and not specialised:
            key.append(-(2**31) <= value < 2**31)
        elif value is None or kind is float:
            key.append(kind)
        elif kind is Slot:
            key += (value.dtype, value.data_ptr() % ALIGNMENT == 0)
        elif isinstance(value, torch.Tensor):
            values[i] = address = value.data_ptr()
            key += (value.dtype, address % ALIGNMENT == 0)
        elif hasattr(value, "block_shape"):
            # A descriptor, ours or among collected launches Triton's. Layouts follow from these.
            key += (value.base.dtype, tuple(value.block_shape))
        elif isinstance(value, tuple):
            trait, values[i] = _trait_of_record(value)
            key.append(trait)
        else:
            key.append(_trait(value, specialised))
    return tuple(key), values


def _trait_of_record(record: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The same for a tuple or record, which may hold tensors and others of its kind; and it with addresses in place of
    tensors, which is how launchers take it.
    """
    traits: list[Any] = []
    values: list[Any] = []
    for x in record:
        if isinstance(x, tuple):
            trait, x = _trait_of_record(x)
        elif hasattr(x, "data_ptr"):
            trait = x.dtype, x.data_ptr() % ALIGNMENT == 0
            x = x.data_ptr() if isinstance(x, torch.Tensor) else x
        else:
            trait = _trait(x, True)
        traits.append(trait)
        values.append(x)
    return tuple(traits), tuple(values)


def _find(launch: Launch, device: int) -> Found:
    """The compiled kernel that a launch needs, and its arguments as `_key` has them; compiles it where no equal one is
    compiled yet.
    """
    key, values = _key(launch, device)
    try:
        found = _kernels.get(key)
    except TypeError:
        # A symbol where Triton needs a constant.
        found = _kernels.get(key := plain(key))
    if found is None:
        if _compiled.get(key) is None:
            _compile_expected(launch, key, device)
        # Triton loads a kernel lazily, and other threads would see it half loaded.
        with _loading:
            found = _kernels.get(key) or _kernels.add(key, _prepare(launch.compile()))
    return Found(found, values)


def _prepare(compiled: Any) -> Kernel:
    encoders = [_encoder(made_with) for made_with in getattr(compiled.metadata, "tensordesc_meta", None) or ()]
    whole = tuple(encoder for encoder in encoders if encoder is not None)
    return Kernel(compiled, _direct_launcher(compiled) if len(whole) == len(encoders) else None, whole)


def _compile_expected(launch: Launch, key: tuple[Any, ...], device: int) -> None:
    """Compile a launch, and with it what else this call will need that is not compiled yet."""
    wanted = {key: launch}
    for other in compiling.expected():
        wanted.setdefault(_key(other, device)[0], other)
    missing = {
        other: one for other, one in wanted.items() if _kernels.get(other) is None and _compiled.get(other) is None
    }
    compiling.compile_all([task(one, other, device) for other, one in missing.items()])


def task(launch: Launch, key: tuple[Any, ...], device: int | None) -> compiling.Task:
    """A launch to compile for a device; None for the target that Triton reports."""
    function, _, *traits = key
    if device is not None:
        # Triton creates its table of compiled kernels here, so that two helpers do not race to.
        launch.kernel.device_caches[device]

    def compile() -> None:
        # A helper thread's current device is the first one.
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            _build_launcher(launch.compile())
        _compiled.add(key, True)

    name = compiling.lock_name(function.__module__, function.__qualname__, traits)
    return compiling.Task(name, compile, len(launch.kernel.src))


def builds_launchers() -> bool:
    """Whether a C compiler makes a launcher for each signature, as Triton 3.6 has it."""
    return hasattr(nvidia, "make_launcher")


def _build_launcher(compiled: Any) -> None:
    """Into Triton's cache, where the first launch finds it.

    Where it cannot be built here the first launch tries again, and raises.
    """
    if builds_launchers():
        with contextlib.suppress(Exception):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def tasks(launches: Sequence[Launch]) -> list[compiling.Task]:
    """Launches to compile for the target that Triton reports: each kernel once."""
    keys = {_key(launch, 0)[0]: launch for launch in launches}
    return [task(launch, key, None) for key, launch in keys.items()]


def _direct_launcher(compiled: Any) -> Direct | None:
    """How a compiled kernel is launched directly; None where Triton must do something at each launch, or its launcher
    is of an unknown kind.
    """
    run = compiled.run
    if run.__class__ is not getattr(nvidia, "CudaLauncher", None):
        return None
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    launch, function, packed = run.launch, compiled.function, compiled.packed_metadata
    code = getattr(launch, "__code__", None)
    if code is not None:
        # Around the launcher is a function that encodes descriptors.
        if "launcher" not in code.co_freevars:
            return None
        launch = launch.__closure__[code.co_freevars.index("launcher")].cell_contents
    first = function, run.launch_cooperative_grid, run.launch_pdl
    if hasattr(run, "arg_annotations") and hasattr(run, "kernel_signature"):
        # Triton 3.7 and later: one launcher for all kernels, which is passed their signature.
        return Direct(
            launch, (*first, packed, None, None, None, None, None, run.arg_annotations, run.kernel_signature), True
        )
    if builds_launchers():
        # Triton 3.6: a launcher for each signature.
        return Direct(launch, (*first, None, None, packed, None, None, None), False)
    return None


class Placed:
    """A tensor descriptor for Triton to encode, its memory at an address."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.base = self
        self.shape, self.strides = list(shape), list(strides)
        self.padding, self.round_f32_to_tf32 = "zero", False
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


# Encodes a descriptor, of a shape and strides, for memory at an address.
Encoder = Callable[[int, tuple[int, ...], tuple[int, ...]], Any]


def _encoder(made_with: Mapping[str, Any]) -> Encoder | None:
    """How descriptors of one parameter of a kernel are encoded: as Triton's `make_tensordesc_arg` does it, without what
    is the same each time.
    """
    utils = triton.runtime.driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or getattr(utils, "fill_tma_descriptor", None)
    known = {"swizzle", "elem_size", "elem_type", "block_size", "fp4_padded", "is_im2col"}
    if (
        fill is None
        or made_with is None
        or not known.issuperset(made_with)
        or made_with["fp4_padded"]
        or made_with.get("is_im2col")
    ):
        return None
    fixed = (
        made_with["swizzle"],
        made_with["elem_size"],
        nvidia.TMA_DTYPE_DEVICE_TO_HOST[made_with["elem_type"]],
        made_with["block_size"],
    )
    return lambda address, shape, strides: fill(address, *fixed, shape, strides, 0)


class Encoded:
    """A descriptor among a launch's arguments.

    Its encoded form is reused while addresses and sizes stay the same.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.kept: dict[Any, Any] = {}

    def encode(self, key: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Encode one that is not kept."""
        if len(self.kept) >= MOST_ENCODED:
            self.kept.clear()
        self.kept[key] = encoded = self.encoder(address, shape, strides)
        return encoded


def find(launch: Launch) -> Found:
    """The compiled kernel of a template's launch on the current device, and its arguments, with slots and symbols in
    place of tensors and numbers.
    """
    return _find(launch, torch._C._cuda_getDevice())


def run(launch: Launch) -> None:
    """Start a launch of tensors on the current device; a grid of 0 programs launches nothing."""
    if not launch.grid:
        return
    device = torch._C._cuda_getDevice()
    (compiled, direct, encoders), values = _find(launch, device)
    hooks = knobs.runtime
    if direct is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[(launch.grid, 1, 1)](*(x.triton() if isinstance(x, Descriptor) else x for x in values))
        return
    if encoders:
        left = iter(encoders)
        spread: list[Any] = []
        for value in values:
            if value.__class__ is Descriptor:
                spread += (next(left)(value.base.data_ptr(), value.shape, value.strides), *value.shape, *value.strides)
            else:
                spread.append(value)
        values = spread
    stream = torch._C._cuda_getCurrentRawStream(device)
    if direct.listed:
        direct.launch(launch.grid, 1, 1, stream, *direct.before, values)
    else:
        direct.launch(launch.grid, 1, 1, stream, *direct.before, *values)


class Repeated:
    """A launch that is repeated with the same kernel, grid and arguments, but for tensors and numbers that vary."""

    def __init__(self, kernel: Any, grid: int, fixed: Mapping[str, Any]) -> None:
        self.kernel, self.grid, self.fixed = kernel, grid, fixed
        # By what Triton specialises on: how it is launched, its arguments, and the positions of those
        # that vary.
        self._known: Kept[tuple[Direct, list[Any], list[int]]] = Kept(64)

    def launch(self, varying: Mapping[str, Any]) -> Launch:
        """One of them."""
        return Launch(self.kernel, self.grid, {**self.fixed, **varying})

    def run(self, varying: Mapping[str, Any]) -> None:
        """Start one on the current device; a grid of 0 programs launches nothing."""
        device = torch._C._cuda_getDevice()
        key: list[Any] = [device, *varying]
        values: list[Any] = []
        for value in varying.values():
            if isinstance(value, torch.Tensor):
                address = value.data_ptr()
                key += (value.dtype, address % ALIGNMENT == 0)
                values.append(address)
            else:
                key.append(_trait(value, True))
                values.append(value)
        known = self._known.get(tuple(key))
        if known is None or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            launch = self.launch(varying)
            run(launch)
            self._remember(tuple(key), launch, list(varying), device)
            return
        (start, before, listed), arguments, places = known
        filled = arguments.copy()
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        stream = torch._C._cuda_getCurrentRawStream(device)
        if listed:
            start(self.grid, 1, 1, stream, *before, filled)
        else:
            start(self.grid, 1, 1, stream, *before, *filled)

    def _remember(self, key: tuple[Any, ...], launch: Launch, varying: Sequence[str], device: int) -> None:
        """What a launch was started with; nothing where Triton must start it, it has descriptors, or what varies is a
        constant or a tuple.
        """
        constants = {x.name for x in self.kernel.params if x.is_constexpr}
        plain = constants.isdisjoint(varying) and not any(isinstance(launch.arguments[name], tuple) for name in varying)
        if launch.grid and plain:
            (_, direct, encoders), values = _find(launch, device)
            if direct is not None and not encoders:
                names = [x.name for x in self.kernel.params]
                self._known.add(key, (direct, values, [names.index(name) for name in varying]))
