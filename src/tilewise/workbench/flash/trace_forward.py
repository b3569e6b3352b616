"""Flash attention's forward: one program of a kernel, ours or anybody's, recorded and simulated."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilewise.ops.flash import launch, simulate
from tilewise.ops.flash.simulate import Options, Tiling
from tilewise.trace.record import Recording, record
from tilewise.trace.request import Traced, arrays
from tilewise.trace.values import Lines, MissingNameError, Naming, Values, named_values

FORWARD = Naming(
    anchor="S",
    before={"Q": ("q", "b_q", "q_block")},
    step={
        "K": ("k", "b_k", "k_block"),
        "S": ("qk", "s", "b_s", "scores", "s_ij"),
        "M": ("m_i", "m"),
        "L": ("l_i", "l"),
        "P": ("p", "b_p"),
        "V": ("v", "b_v", "v_block"),
        "O": ("acc", "o", "acc_o"),
    },
    after={"O_final": ("b_o", "o"), "LSE": ("b_lse", "lse")},
    first={"O": "O_scale"},
)
# Our own kernel has a variable for each: the plain product, and the sum before this step's is added.
OUR_FORWARD = dataclasses.replace(
    FORWARD,
    step={**FORWARD.step, "S": ("b_s",), "S_pre_scaling": ("b_qk",), "O_scale": ("acc_scaled",)},
    first={},
    masks_scores=True,
)
# The order in which the values of a step depend on each other.
FORWARD_ORDER = ("K", "S_pre_scaling", "S", "M", "P", "L", "V", "O_scale", "O")
HEADS, CHANNELS = 2, 64


@dataclass(frozen=True)
class Case:
    """The inputs of a trace: one batch entry of T tokens, HEADS query heads, on one key head for our own kernels."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options

    @property
    def inputs(self) -> launch.Inputs:
        """As the launcher takes them."""
        options = self.options
        return launch.Inputs(
            self.q,
            self.k,
            self.v,
            None,
            None,
            options.left,
            options.right,
            options.scale,
            options.softcap,
            options.key_stride,
        )

    def head(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """[T, D] of one head."""
        return x[0, :, head]


def find_rows(value: np.ndarray, tensor: torch.Tensor, block: int) -> tuple[int, int, float]:
    """Head and first row of the tile of `tensor` [1, T, H, D] that `value` holds, and the factor it is
    multiplied by.
    """
    _, tokens, heads, channels = tensor.shape
    source = tensor[0].double().cpu().numpy()
    best = (np.inf, 0, 0, 1.0)
    for head in range(heads):
        for start in range(0, tokens, block):
            rows = source[start : start + block, head]
            ours = value[: rows.shape[0], :channels].astype(np.float64)
            factor = float((ours * rows).sum() / max((rows * rows).sum(), 1e-300))
            error = float(
                np.abs(ours - factor * rows).max(initial=0.0) / max(np.abs(factor * rows).max(initial=0.0), 1e-300)
            )
            best = min(best, (error, head, start, factor))
    error, head, start, factor = best
    if error > 2**-6:
        raise MissingNameError(
            "what was recorded as Q (or K) is no tile of the inputs: name the right variable with --names Q=..."
        )
    return head, start, factor


def _units(value: np.ndarray, simulated: np.ndarray, candidates: Mapping[str, float]) -> float:
    """Which of the candidate units the kernel works in, from its first tile; 1 where none fits."""
    both = np.isfinite(value) & np.isfinite(simulated)
    scale = np.abs(simulated[both]).max(initial=0.0)
    for unit in candidates.values():
        if scale and np.abs(value[both] / unit - simulated[both]).max(initial=0.0) <= 2**-6 * scale:
            return unit
    return 1.0


def trace_forward(
    case: Case, call: Callable[[], Any], program: int, naming: Naming = FORWARD, required: tuple[str, ...] = ()
) -> Traced:
    """Record what `call` launches, and simulate the program that was recorded."""
    with record(program) as recording:
        call()
    launched, values, lines = _first_with_anchor(recording, naming, required)
    if "Q" not in values:
        raise MissingNameError("the query tile was not found: name its variable with --names Q=...")
    block_m, block_n = values["S_0"].shape
    head, i_m, factor = find_rows(values["Q"], case.q, block_m)
    group = case.q.shape[2] // case.k.shape[2]
    reverse = False
    if "K_0" in values and case.options.right is None:
        reverse = find_rows(values["K_0"], case.k, block_n)[1] > 0
    tiling = Tiling(block_m, block_n, reverse=reverse)
    tensors = case.head(case.q, head), case.head(case.k, head // group), case.head(case.v, head // group)
    simulation = arrays(simulate.forward(*tensors, i_m, tiling, case.options))
    exact = arrays(
        simulate.forward(tensors[0].double(), tensors[1].double(), tensors[2].double(), i_m, tiling, case.options)
    )
    rows = min(block_m, case.q.shape[1] - i_m)
    kernel = crop(_in_our_units(values, simulation, case.options.scale, factor, naming.masks_scores), simulation, rows)
    simulation, exact = (
        {name: x if name.startswith(("K_", "V_")) else x[:rows] for name, x in found.items()}
        for found in (simulation, exact)
    )
    steps = sum(name.startswith("S_") and name[2:].isdigit() for name in simulation)
    return Traced(
        recording.kernels[launched],
        "forward",
        f"program {program}, head {head}, rows {i_m} to {i_m + rows - 1}",
        kernel,
        simulation,
        exact,
        steps,
        FORWARD_ORDER,
        lines,
        (head, i_m, rows),
    )


def _first_with_anchor(recording: Recording, naming: Naming, required: tuple[str, ...]) -> tuple[int, Values, Lines]:
    problem: MissingNameError | None = None
    for launched in range(len(recording.kernels)):
        try:
            values, lines = named_values(recording.of_launch(launched), naming, required)
            return launched, values, lines
        except MissingNameError as error:
            problem = problem or error
    raise problem or MissingNameError(
        "no Triton kernel was launched: nothing could be recorded (kernels must be interpreted, see tilewise doctor)"
    )


def _in_our_units(values: Values, simulation: Values, scale: float, q_factor: float, masks: bool) -> Values:
    """Q, S and M as the simulation has them: S unscaled, M in base 2.

    The units are read off the first tile and hold for all.
    """
    log2e = simulate.LOG2E
    s_unit = _units(values["S_0"], simulation["S_0"], {"raw": 1.0, "scaled": scale, "base 2": scale * log2e})
    m_unit = (
        _units(values["M_0"], simulation["M_0"], {"base 2": 1.0, "base e": 1 / log2e, "raw": 1 / (scale * log2e)})
        if "M_0" in values
        else 1.0
    )
    masks = masks or any(
        np.isneginf(x).any() for name, x in values.items() if name.startswith("S_") and name[2:].isdigit()
    )
    result = {}
    for name, x in values.items():
        if name.startswith("S_") and name[2:].isdigit():
            x = x / s_unit
            if not masks and name in simulation:
                # A kernel that masks elsewhere: its scores are judged where they count.
                x = np.where(np.isneginf(simulation[name]), -np.inf, x)
        result[name] = x / m_unit if name.startswith("M_") else x / q_factor if name == "Q" else x
    return result


def crop(kernel: Values, simulation: Values, rows: int) -> Values:
    """Without the channels that pad a tile, and without the rows past the end."""
    result = {}
    for name, x in kernel.items():
        shape = simulation[name].shape if name in simulation else x.shape
        x = x[tuple(slice(0, size) for size in shape)] if x.ndim == len(shape) else x
        result[name] = x if name.startswith(("K_", "V_")) else x[:rows]
    return result
