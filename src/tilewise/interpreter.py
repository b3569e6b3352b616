"""Triton's interpreter, repaired: kernels on CPU tensors, in NumPy, for machines without a GPU; and a simulation of
Hopper for kernels in Gluon, which it does not know.

As it comes (3.6 to 3.9) it computes bf16 on the raw bits, truncates fp32 to bf16, sorts 256 numbers in a second, fails
on `range(tensor)` with NumPy 2.4 (3.6), and mixes up launches of two threads.

The repair changes Triton for the whole process, so it happens only where a process interprets kernels: Triton reads
TRITON_INTERPRET when it is imported, and what it decided then holds. Three places repair: `use_where_no_gpu`, which the
command line and the pytest plugin call; an explicit `repair`; and the operators, when they are imported in a process
that interprets. A process that compiles for a GPU is never changed: there `repair` raises.
"""

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tilewise import _interpreter_speed

__all__ = ["interpreting", "quiet", "repair", "scheduled", "use_where_no_gpu", "written_barriers"]

_VARIABLE = "TRITON_INTERPRET"
_repairing = threading.Lock()
_repaired = _set_here = False
_launches = 0
_simulated: list[str] = []


def use_where_no_gpu() -> bool:
    """Have Triton interpret kernels where torch sees no GPU, and repair its interpreter.

    Call it before anything imports triton, which reads TRITON_INTERPRET only then. A TRITON_INTERPRET that is already
    set is left as it is. Without triton, or with a GPU, nothing happens.

    Returns:
        Whether this process interprets kernels.

    Raises:
        RuntimeError: where kernels should be interpreted and triton was imported to compile them.
    """
    global _set_here
    if not _has_triton() or not _wanted():
        return False
    if "triton" in sys.modules and not interpreting():
        raise RuntimeError(
            "triton is already imported, and reads TRITON_INTERPRET only then: "
            "call tilewise.interpreter.use_where_no_gpu() first, or set TRITON_INTERPRET=1 in the environment"
        )
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = "1"
        _set_here = True
    repair()
    return True


def _has_triton() -> bool:
    try:
        return "triton" in sys.modules or importlib.util.find_spec("triton") is not None
    except ImportError:
        # Its import is blocked.
        return False


def _wanted() -> bool:
    if _VARIABLE in os.environ:
        return os.environ[_VARIABLE].lower() in ("1", "true", "on", "yes", "y")
    import torch

    return not torch.cuda.is_available()


def set_here() -> bool:
    """Whether `use_where_no_gpu`, not the user, set TRITON_INTERPRET in this process."""
    return _set_here


def interpreting() -> bool:
    """Whether Triton was imported to interpret kernels, even if TRITON_INTERPRET has changed since.

    Triton decides for each function when it is defined: for its own library, that is when it was imported.
    """
    from triton.language import standard

    return any(type(value).__name__ == "InterpretedFunction" for value in vars(standard).values())


def launches() -> int:
    """How many kernels this process has interpreted since the repair."""
    return _launches


def simulated() -> int:
    """How many of them were in Gluon."""
    return len(_simulated)


def simulated_since(count: int) -> list[str]:
    """Names of those in Gluon after so many."""
    return _simulated[count:]


def repair() -> None:
    """Repair the interpreter of this process, once: a second call does nothing.

    Raises:
        RuntimeError: where this process compiles kernels. The repair replaces parts of Triton that compiling needs.
    """
    global _repaired
    with _repairing:
        if _repaired:
            return
        if not interpreting():
            raise RuntimeError(
                "this process compiles kernels, and repairing the interpreter would break that: set TRITON_INTERPRET=1 "
                "before triton is imported to interpret them"
            )
        _repair_range()
        _repair_bf16_arithmetic()
        _repair_bf16_reductions()
        _interpreter_speed.speed_up()
        # Around everything a launch does, including the helpers' bookkeeping.
        _repair_launches()
        _simulate_gluon()
        _tune_without_a_clock()
        _launch_in_order()
        _repaired = True


def _launch_in_order() -> None:
    """A launch that waits for the one before it finds that one ended, and none is launched early."""
    from triton.language.extra import cuda

    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda: None


_seed: ContextVar[int | None] = ContextVar("tilewise_schedule", default=None)


@contextlib.contextmanager
def scheduled(seed: int | None) -> Iterator[None]:
    """Inside, this context's Gluon kernels run under another interleaving of their partitions, CTAs and copies: by
    chance, the same for the same seed. By default one runs until it must wait.
    """
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


_compiler_barriers: ContextVar[bool] = ContextVar("tilewise_compiler_barriers", default=True)


@contextlib.contextmanager
def written_barriers() -> Iterator[None]:
    """Inside, this context's Gluon kernels have the thread barriers that are written in them, and none that Triton's
    compiler would add.
    """
    token = _compiler_barriers.set(False)
    try:
        yield
    finally:
        _compiler_barriers.reset(token)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Overflow to infinity and the like without NumPy's warnings, as on a GPU; in this thread alone.

    Repaired, the interpreter runs every launch like this.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        yield


def _repair_range() -> None:
    """`for i in range(tensor)`: NumPy 2.4 no longer turns an array of one element into an integer."""
    import numpy as np
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _simulate_gluon() -> None:
    """Kernels in Gluon run on CPU tensors, where this Triton has it."""
    try:
        from triton.experimental.gluon._runtime import GluonJITFunction
    except ImportError:
        return
    compiled = GluonJITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        global _launches
        if warmup:
            return compiled(self, *arguments, grid=grid, warmup=warmup, **named)
        from tilewise._gluon.launch import launch

        _launches += 1
        _simulated.append(self.fn.__name__)
        with quiet():
            return launch(self, grid, arguments, named, _seed.get(), _compiler_barriers.get())

    GluonJITFunction.run = run


def _tune_without_a_clock() -> None:
    """An autotuner runs each configuration once, which checks it, and takes the first that fits: without a GPU no time
    tells which is fast.
    """
    from triton.runtime.autotuner import Autotuner

    def run_once(kernel_call: Callable[[], None], quantiles: Any) -> list[float]:
        try:
            kernel_call()
        except RuntimeError as error:
            if getattr(error, "kind", None) != "too much shared memory":
                raise
            return [float("inf")] * len(quantiles)
        return [0.0] * len(quantiles)

    Autotuner.do_bench = property(lambda _self: run_once, lambda _self, _value: None)
    # Times of this machine are kept for none.
    Autotuner.check_disk_cache = lambda _self, _key, _configs, bench: bench()


def _repair_launches() -> None:
    """One launch at a time, without NumPy's warnings.

    A launch's grid and program, and the patched language, are global to the process: two threads would read each
    other's program numbers, and the first to end would remove the patch under the other.
    """
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__
    # A hook before a launch may launch too.
    launching = threading.RLock()

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        global _launches
        with launching, quiet():
            _launches += 1
            return launch(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = call


def widen_bf16(bits: Any) -> Any:
    """uint16 bits of bf16 -> the same values in fp32."""
    import numpy as np

    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(values: Any) -> Any:
    """Numbers -> bits of the nearest bf16, ties to even; NaN stays NaN."""
    import numpy as np

    values = np.ascontiguousarray(np.asarray(values, np.float32))
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(handle: Any) -> bool:
    return getattr(getattr(getattr(handle, "dtype", None), "scalar", None), "name", None) == "bf16"


def _widened(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(widen_bf16(handle.data), tl.float32) if _is_bf16(handle) else handle


def _narrowed(values: Any) -> Any:
    """A handle of bf16 from numbers; comparisons stay booleans."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(values if values.dtype == np.bool_ else round_to_bf16(values), tl.bfloat16)


def _repair_bf16_arithmetic() -> None:
    """Element-wise work, casts, FMA and dot: widen to fp32, compute, round once."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle_of = interpreter.TensorHandle

    def wrap(name: str, needed: Callable[..., bool], repaired: Callable[..., Any]) -> None:
        original = getattr(builder, name)

        def method(self: Any, *args: Any) -> Any:
            return repaired(original, self, *args) if needed(*args) else original(self, *args)

        setattr(builder, name, method)

    def any_bf16(*args: Any) -> bool:
        return any(map(_is_bf16, args))

    def compute(_original: Any, _self: Any, *args: Any) -> Any:
        *operands, operation = args
        return _narrowed(operation(*(_widened(operand).data for operand in operands)))

    def cast(original: Any, self: Any, source: Any, dtype: Any) -> Any:
        if _is_bf16(source):
            if dtype.scalar == tl.bfloat16:
                return original(self, source, dtype)
            return handle_of(widen_bf16(source.data).astype(interpreter._get_np_dtype(dtype)), dtype.scalar)
        return handle_of(round_to_bf16(source.data), dtype.scalar)

    def fma(_original: Any, _self: Any, x: Any, y: Any, z: Any) -> Any:
        return _narrowed(widen_bf16(x.data).astype(np.float64) * widen_bf16(y.data) + widen_bf16(z.data))

    def dot(original: Any, self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, _widened(a), _widened(b), *rest)

    wrap("binary_op", any_bf16, compute)
    wrap("unary_op", any_bf16, compute)
    # np.where moves bits unchanged: the original is right.
    wrap("ternary_op", lambda a, b, c, operation: operation is not np.where and any_bf16(a, b, c), compute)
    wrap("cast_impl", lambda source, dtype: any_bf16(source) or dtype.scalar == tl.bfloat16, cast)
    wrap("create_fma", any_bf16, fma)
    wrap("create_dot", any_bf16, dot)
    builder.get_bf16 = lambda self, value: _narrowed(np.array([value], np.float32))


def _repair_bf16_reductions() -> None:
    """Reductions and scans of bf16: in fp32, the result rounded once."""
    import triton.language as tl
    from triton.runtime import interpreter

    def widen(tensor: Any) -> Any:
        if tensor.dtype != tl.bfloat16:
            return tensor
        return tl.core.tensor(_widened(tensor.handle), tl.block_type(tl.float32, list(tensor.handle.data.shape)))

    def narrow(tensor: Any, dtype: Any) -> Any:
        if dtype != tl.bfloat16 or tensor.dtype != tl.float32:
            return tensor
        handle = _narrowed(tensor.handle.data)
        block = tl.block_type(tl.bfloat16, list(handle.data.shape)) if tensor.type.is_block() else tl.bfloat16
        return tl.core.tensor(handle, block)

    def wrap(cls: Any) -> None:
        original = cls.apply_impl

        def apply_impl(self: Any, value: Any) -> Any:
            if not isinstance(value, tuple | list):
                return narrow(original(self, widen(value)), value.dtype)
            result = original(self, type(value)(widen(item) for item in value))
            if not isinstance(result, tuple | list):
                return narrow(result, value[0].dtype)
            return type(result)(narrow(item, given.dtype) for item, given in zip(result, value, strict=True))

        cls.apply_impl = apply_impl

    wrap(interpreter.ReduceOps)
    wrap(interpreter.ScanOps)
