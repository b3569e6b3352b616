"""Values of one program of our own kernels on a GPU, through taps compiled in for this one launch."""

import torch

from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash import launch, simulate
from tilewise.ops.flash.configs import Config
from tilewise.ops.flash.kernels.bwd import DkdvStep, DqStep
from tilewise.ops.flash.kernels.fwd import FwdStep
from tilewise.ops.flash.simulate import Tiling
from tilewise.trace.beside import Tap
from tilewise.trace.request import Traced, arrays
from tilewise.trace.values import Values
from tilewise.workbench.flash.programs import FORWARD_ORDER, HEADS, Backward, Case, crop, stored

# What each slot holds, as the kernels declare it; FORWARD's first is written before the loop, and `t` marks tiles that
# the kernel keeps transposed.
FORWARD = ("Q", *FwdStep._fields)
DKDV, DQ = DkdvStep._fields, DqStep._fields


def _place(case: Case, config: Config, program: int) -> tuple[int, int]:
    """Head and first row of a program that owns query tiles; if later keys are masked, the last tile comes first."""
    tiles = -(-case.q.shape[1] // config.block_m)
    tile = program % tiles
    return program // tiles, (tile if case.options.right is None else tiles - 1 - tile) * config.block_m


def tap_forward(case: Case, config: Config, program: int) -> Traced:
    """The forward kernel's program next to the simulation."""
    tap = Tap(
        case.q, case.v, config.block_m, config.block_n, program, len(FORWARD), -(-case.k.shape[1] // config.block_n)
    )
    o, lse = launch.forward(case.inputs, config, tap.argument)
    head, i_m = _place(case, config, program)
    block_d, block_dv = tile_widths(case.q.shape[-1], case.v.shape[-1], case.q.element_size())
    m, n = config.block_m, config.block_n
    shapes = {
        "K": (n, block_d),
        "S_pre_scaling": (m, n),
        "M": (m,),
        "L": (m,),
        "P": (m, n),
        "V": (n, block_dv),
        "O_scale": (m, block_dv),
    }
    shapes["O"] = shapes["O_scale"]
    tiling = Tiling(m, n)
    tensors = case.head(case.q, head), case.head(case.k, 0), case.head(case.v, 0)
    simulation = arrays(simulate.forward(*tensors, i_m, tiling, case.options))
    exact = arrays(
        simulate.forward(tensors[0].double(), tensors[1].double(), tensors[2].double(), i_m, tiling, case.options)
    )
    blocks = simulate.key_blocks(i_m, case.q.shape[1], case.k.shape[1], tiling, case.options)
    values: Values = {"Q": tap.value(0, 0, m, block_d)}
    for step, i_n in enumerate(blocks):
        values |= {f"{name}_{step}": tap.value(i_n // n, FORWARD.index(name), *shape) for name, shape in shapes.items()}
    values |= {"O_final": stored(o, head, i_m, m), "LSE": simulate.tile(lse[0, head], i_m, m).double().cpu().numpy()}
    rows = min(m, case.q.shape[1] - i_m)
    kernel = crop(values, simulation, rows)
    simulation, exact = (
        {name: x if name.startswith(("K_", "V_")) else x[:rows] for name, x in found.items()}
        for found in (simulation, exact)
    )
    place = f"program {program}, head {head}, rows {i_m} to {i_m + rows - 1}"
    return Traced(
        "flash_fwd_kernel",
        "forward",
        place,
        kernel,
        simulation,
        exact,
        len(blocks),
        FORWARD_ORDER,
        at=(head, i_m, rows),
    )


def tap_backward(case: Case, do: torch.Tensor, config: Config, program: int) -> list[Traced]:
    """A program of the kernel that owns key tiles, and one of the kernel that owns query tiles."""
    tiles_m, tiles_n = -(-case.q.shape[1] // config.block_m), -(-case.k.shape[1] // config.block_n)
    key_program = program % tiles_n
    key_tap = Tap(case.q, case.v, config.block_m, config.block_n, key_program, len(DKDV), HEADS * tiles_m)
    query_tap = Tap(case.q, case.v, config.block_m, config.block_n, program, len(DQ), tiles_n)
    backward = Backward(case, do, config)
    backward.run((key_tap.argument, query_tap.argument))
    block_d, block_dv = tile_widths(case.q.shape[-1], case.v.shape[-1], case.q.element_size())
    m, n, tiling = config.block_m, config.block_n, Tiling(config.block_m, config.block_n)

    i_n = key_program * n
    pairs = [
        (h, i_m)
        for h in range(HEADS)
        for i_m in simulate.query_blocks(i_n, case.q.shape[1], case.k.shape[1], tiling, case.options)
    ]
    shapes = {
        "Q": (m, block_d),
        "St": (n, m),
        "Pt": (n, m),
        "dO": (m, block_dv),
        "dV": (n, block_dv),
        "dPt": (n, m),
        "dSt": (n, m),
        "dK": (n, block_d),
    }
    values: Values = {}
    for step, (h, i_m) in enumerate(pairs):
        for slot, name in enumerate(DKDV):
            value = key_tap.value(h * tiles_m + i_m // m, slot, *shapes[name])
            values[f"{name.removesuffix('t')}_{step}"] = value.T if name.endswith("t") else value
    keys = backward.of_keys(values, i_n, key_program)

    head, i_m = _place(case, config, program)
    blocks = simulate.key_blocks(i_m, case.q.shape[1], case.k.shape[1], tiling, case.options)
    shapes = {
        "K": (n, block_d),
        "S": (m, n),
        "V": (n, block_dv),
        "dP": (m, n),
        "P": (m, n),
        "dS": (m, n),
        "dQ": (m, block_d),
    }
    values = {}
    for step, i_n in enumerate(blocks):
        values |= {
            f"{name}_{step}": query_tap.value(i_n // n, DQ.index(name), *shape) for name, shape in shapes.items()
        }
    if blocks:
        values["delta"] = query_tap.value(blocks[0] // n, DQ.index("delta"), m)
    return [keys, backward.of_queries(values, head, i_m, program)]
