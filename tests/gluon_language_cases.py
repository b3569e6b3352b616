"""Cases of the language's other half: along an axis, places, dtypes of 8 bits and tf32, what Ampere has."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from gluon_ampere_kernels import (
    barrier_kernel,
    steps_kernel,
    threads_product_kernel,
    warpgroup_product_kernel,
    warps_product_kernel,
)
from gluon_instruction_kernels import cast_kernel
from gluon_language_kernels import arithmetic_kernel, arrange_kernel, combine_kernel, inspect_kernel
from triton.experimental.gluon import language as gl

COUNT, SIDE = 128, 64
F16, BF16, F32, I8, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Run = Callable[[torch.device], torch.Tensor]
COMBINED = (
    *("reduce", "reduce keep_dims", "reduce all", "reduce two"),
    *("associative_scan", "associative_scan reverse", "associative_scan two"),
    *("cumsum", "cumprod", "xor_sum", "reduce_or", "methods", "map_elementwise"),
)
ARRANGED = (
    *("join", "join, split", "split", "broadcast", "broadcast_to", "trans", "ravel"),
    *("gather", "gather axis", "histogram", "histogram mask", "set_auto_layout", "full_like"),
)
# Of e4m3: a source of 8 bits holds no more.
LARGEST = 448.0
GLUON = {I8: gl.int8, F16: gl.float16, F32: gl.float32, E4M3: gl.float8e4nv, E5M2: gl.float8e5}


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _numbers(kernel: object, name: str, device: torch.device) -> torch.Tensor:
    x = torch.randint(-1000, 1000, (COUNT,), generator=torch.Generator().manual_seed(7), dtype=I32).to(device)
    out = torch.full((COUNT,), 77, dtype=I32, device=device)
    kernel[(1,)](x, out, name)  # type: ignore[index]
    return out


def _arithmetic(name: str, device: torch.device) -> torch.Tensor:
    x, y = (_random(seed, COUNT).to(device) for seed in (8, 9))
    out = torch.full((COUNT,), 77.0, device=device)
    arithmetic_kernel[(1,)](x, y, out, name)
    return out


def _cast(source: torch.dtype, target: torch.dtype, device: torch.device) -> torch.Tensor:
    """Odd numbers first, and some that the target does not hold."""
    x = _random(3, COUNT) * 2.0 ** torch.randint(-12, 18, (COUNT,), generator=torch.Generator().manual_seed(3))
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 465.0, 0.0009765625])
    x = x.clamp(-LARGEST, LARGEST) if source in (E4M3, E5M2) else x
    out = torch.full((COUNT,), 77.0).to(target).to(device)
    cast_kernel[(1,)](x.to(source).to(device), out, "to")
    return out.float()


def _inspected(name: str, device: torch.device) -> torch.Tensor:
    out = torch.full((COUNT,), 77, dtype=I32, device=device)
    inspect_kernel[(1,)](out, name)
    return out


def _operands(dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Small whole numbers, whose products are summed exactly; of fp32 with a bit beyond tf32."""
    found = []
    for seed in (4, 5):
        x = (_random(seed, SIDE, SIDE) * 3).round().clamp(-8, 8)
        x = x * (1 + 2**-10 + 2**-11) if dtype is F32 and seed == 4 else x
        found.append(x.to(dtype).to(device))
    return found


def _by_warps(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    out = torch.full((SIDE, SIDE), 77, dtype=I32 if dtype is I8 else F32, device=device)
    warps_product_kernel[(1,)](*_operands(dtype, device), out, 4 // dtype.itemsize, 0, None)
    return out


def _by_threads(device: torch.device) -> torch.Tensor:
    out = torch.full((SIDE, SIDE), 77.0, device=device)
    threads_product_kernel[(1,)](*_operands(F32, device), out)
    return out


def _by_warpgroup(dtype: torch.dtype, in_registers: bool, device: torch.device) -> torch.Tensor:
    out = torch.full((SIDE, SIDE), 77, dtype=I32 if dtype is I8 else F32, device=device)
    a, b = _operands(dtype, device)
    warpgroup_product_kernel[(1,)](a, b, out, GLUON[dtype], 8 * dtype.itemsize, in_registers)
    return out


def _copied(device: torch.device) -> torch.Tensor:
    x, out = _random(1, 300).to(device), torch.full((512,), 77.0, device=device)
    steps_kernel[(1,)](x, out, 300, 4, 1, True, False)
    return out


def _told(increments: bool, device: torch.device) -> torch.Tensor:
    out = torch.full((SIDE, SIDE), 77.0, device=device)
    barrier_kernel[(1,)](_operands(F16, device)[0], out, increments, True, True)
    return out


def cases() -> Iterator[tuple[str, Run]]:
    """Every case with its name."""
    for name in COMBINED:
        yield f"combine {name}", partial(_numbers, combine_kernel, name)
    for name in ARRANGED:
        yield f"arrange {name}", partial(_numbers, arrange_kernel, name)
    for name in ("add", "sub", "mul", "div_rn", "sqrt_rn"):
        yield f"arithmetic {name}", partial(_arithmetic, name)
    for name in ("bank_conflicts", "to_linear_layout"):
        yield name, partial(_inspected, name)
    for small in (E4M3, E5M2):
        for dtype in (F32, F16, BF16):
            yield f"cast {dtype} {small}", partial(_cast, dtype, small)
            if (small, dtype) != (E5M2, BF16):
                # There Triton makes a number of a NaN.
                yield f"cast {small} {dtype}", partial(_cast, small, dtype)
    for dtype in (F16, F32, I8, E4M3, E5M2):
        yield f"mma_v2 {dtype}", partial(_by_warps, dtype)
    yield "dot_fma", _by_threads
    for dtype in (F32, I8, E4M3, E5M2):
        for in_registers in (False, True):
            yield f"warpgroup_mma {dtype} {in_registers}", partial(_by_warpgroup, dtype, in_registers)
    yield "async_copy", _copied
    for increments in (False, True):
        yield f"mbarrier_arrive {increments}", partial(_told, increments)
