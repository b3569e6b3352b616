"""Flash attention's forward: one program of a kernel, ours or a user's, recorded and simulated."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tilewise.ops._device.records import Taps
from tilewise.ops.flash import configs, launch, simulate
from tilewise.ops.flash.simulate import Options, Tiling
from tilewise.trace.record import Recording, fault_of, record
from tilewise.trace.request import Traced, arrays, split_step
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
# Our own kernel has a variable for each: the plain product, and the accumulator before this step's product is added.
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
    """The inputs of a trace: one batch entry of T tokens, HEADS query heads, on one KV head for our own kernels."""

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
    """Head and first row of the tile of `tensor` [1, T, H, D] that `value` holds, and the factor it is scaled by."""
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
    """Which of the candidate units the kernel works in, from its first tile; 1 if none fits."""
    both = np.isfinite(value) & np.isfinite(simulated)
    scale = np.abs(simulated[both]).max(initial=0.0)
    for unit in candidates.values():
        if scale and np.abs(value[both] / unit - simulated[both]).max(initial=0.0) <= 2**-6 * scale:
            return unit
    return 1.0


def trace_forward(
    case: Case, call: Callable[[], Any], program: int, naming: Naming = FORWARD, required: tuple[str, ...] = ()
) -> Traced:
    """Record what `call` launches, and simulate the recorded program."""
    with record(program) as recording:
        fault = fault_of(call)
    try:
        launched, values, lines = _first_with_anchor(recording, naming, required)
    except MissingNameError:
        if fault:
            raise fault from None
        raise
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
    kernel = crop(_in_our_units(values, simulation, case.options.scale, factor), simulation, rows)
    unjudged = {} if naming.masks_scores else _masked_elsewhere(kernel, simulation, rows)
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
        unjudged=unjudged,
        fault=str(fault or ""),
    )


def _masked_elsewhere(kernel: Values, simulation: Values, rows: int) -> Values:
    """Of a kernel that masks P, or another variable than S: where its scores do not count. None where it has -inf."""
    scores = [name for name in kernel if name.startswith("S_") and name[2:].isdigit() and name in simulation]
    if any(np.isneginf(kernel[name]).any() for name in scores):
        return {}
    return {name: np.isneginf(simulation[name][:rows]) for name in scores}


def _first_with_anchor(recording: Recording, naming: Naming, required: tuple[str, ...]) -> tuple[int, Values, Lines]:
    problem: MissingNameError | None = None
    for launched, events in recording.sequences():
        try:
            values, lines = named_values(events, naming, required)
            return launched, values, lines
        except MissingNameError as error:
            problem = problem or error
    raise problem or MissingNameError(
        "no Triton kernel was launched: nothing could be recorded (kernels must be interpreted, see tilewise doctor)"
    )


def _in_our_units(values: Values, simulation: Values, scale: float, q_factor: float) -> Values:
    """Q, S and M as the simulation has them: S unscaled, M in base 2.

    The units are inferred from the first tile and hold for all.
    """
    log2e = simulate.LOG2E
    s_unit = _units(values["S_0"], simulation["S_0"], {"raw": 1.0, "scaled": scale, "base 2": scale * log2e})
    m_unit = (
        _units(values["M_0"], simulation["M_0"], {"base 2": 1.0, "base e": 1 / log2e, "raw": 1 / (scale * log2e)})
        if "M_0" in values
        else 1.0
    )
    result = {}
    for name, x in values.items():
        if name.startswith("S_") and name[2:].isdigit():
            x = x / s_unit
        result[name] = x / m_unit if name.startswith("M_") else x / q_factor if name == "Q" else x
    return result


def crop(kernel: Values, simulation: Values, rows: int) -> Values:
    """Without a tile's padding channels, and without the rows past the end."""
    result = {}
    for name, x in kernel.items():
        shape = simulation[name].shape if name in simulation else x.shape
        x = x[tuple(slice(0, size) for size in shape)] if x.ndim == len(shape) else x
        result[name] = x if name.startswith(("K_", "V_")) else x[:rows]
    return result


DQ = Naming(
    anchor="S",
    before={"Q": ("b_q",), "dO": ("b_do",), "LSE2": ("b_lse",), "delta": ("b_delta",)},
    step={
        "K": ("b_k",),
        "S": ("b_s",),
        "V": ("b_v",),
        "dP": ("b_dp",),
        "P": ("b_p",),
        "dS": ("b_ds",),
        "dQ": ("acc_dq",),
    },
)
DKDV = Naming(
    anchor="S",
    before={"K": ("b_k",), "V": ("b_v",)},
    step={
        "Q": ("b_q",),
        "S": ("b_sT",),
        "P": ("b_pT",),
        "dO": ("b_do",),
        "dV": ("acc_dv",),
        "dP": ("b_dpT",),
        "dS": ("b_dsT",),
        "dK": ("acc_dk",),
    },
    transposed=frozenset({"S", "P", "dP", "dS"}),
)
# The order in which the values of a step depend on each other.
ORDER = {"dq": ("K", "S", "V", "dP", "P", "dS", "dQ"), "dkdv": ("Q", "S", "P", "dO", "dV", "dP", "dS", "dK")}


class Backward:
    """What both ways of tracing a backward share: the results it starts from, its gradients, and the simulations to
    compare with.
    """

    def __init__(self, case: Case, do: torch.Tensor, config: configs.Config) -> None:
        self._case, self._do, self._tiling = case, do, Tiling(config.block_m, config.block_n)
        self._config = config
        self._o, self._lse = launch.forward(case.inputs, config)
        rows = (simulate.prepare(self._o[0, :, h], do[0, :, h], self._lse[0, h], None) for h in range(HEADS))
        self._delta, self._lse_log2 = zip(*rows, strict=True)

    def run(self, taps: tuple[Taps | None, Taps | None] = (None, None)) -> None:
        """Launch it."""
        self._dq, self._dk, self._dv = launch.backward(
            self._case.inputs, self._o, self._lse, self._do, None, self._config, self._config, taps
        )

    def of_keys(self, values: Values, start: int, program: int, lines: Lines | None = None) -> Traced:
        """The kernel that owns key tiles, from its program's `values`."""
        block = self._config.block_n
        values = values | {"dK_final": stored(self._dk, 0, start, block), "dV_final": stored(self._dv, 0, start, block)}
        q, do = (x[0].transpose(0, 1) for x in (self._case.q, self._do))
        tensors = q, *self._keys(), do, torch.stack(self._lse_log2), torch.stack(self._delta)
        rows = min(block, self._case.k.shape[1] - start)
        place = f"program {program}, KV head 0, keys {start} to {start + rows - 1}"
        return self._beside(
            ("flash_bwd_dkdv_kernel", "dkdv", place), simulate.backward_dkdv, tensors, values, start, rows, lines
        )

    def of_queries(self, values: Values, head: int, start: int, program: int, lines: Lines | None = None) -> Traced:
        """The kernel that owns query tiles, likewise."""
        block = self._config.block_m
        values = values | {"dQ_final": stored(self._dq, head, start, block)}
        tensors = (
            self._case.head(self._case.q, head),
            *self._keys(),
            self._case.head(self._do, head),
            self._lse_log2[head],
            self._delta[head],
        )
        rows = min(block, self._case.q.shape[1] - start)
        place = f"program {program}, head {head}, rows {start} to {start + rows - 1}"
        traced = self._beside(
            ("flash_bwd_dq_kernel", "dq", place), simulate.backward_dq, tensors, values, start, rows, lines
        )
        return replace(traced, at=(head, start, rows))

    def _keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._case.head(self._case.k, 0), self._case.head(self._case.v, 0)

    def _beside(
        self,
        names: tuple[str, str, str],
        run: simulate.Program,
        tensors: tuple[torch.Tensor, ...],
        values: Values,
        start: int,
        rows: int,
        lines: Lines | None,
    ) -> Traced:
        simulation = arrays(run(*tensors, start, self._tiling, self._case.options))
        exact = arrays(run(*(x.double() for x in tensors), start, self._tiling, self._case.options))
        kernel = {
            name: x[tuple(slice(0, size) for size in simulation[name].shape)]
            for name, x in values.items()
            if name in simulation
        }
        kernel, simulation, exact = (_inside(names[1], x, rows) for x in (kernel, simulation, exact))
        return Traced(
            *names,
            kernel,
            simulation,
            exact,
            sum(name.startswith("S_") for name in simulation),
            ORDER[names[1]],
            lines or {},
        )


def trace_backward(case: Case, do: torch.Tensor, config: configs.Config, program: int) -> list[Traced]:
    """Our own backward, recorded: a program of the kernel that owns key tiles, and one of the kernel that owns query
    tiles.
    """
    backward = Backward(case, do, config)
    key_program = program % -(-case.k.shape[1] // config.block_n)
    with record({"flash_bwd_dkdv_kernel": key_program, "flash_bwd_dq_kernel": program}) as recording:
        backward.run()
    values, lines = named_values(recording.of_kernel("flash_bwd_dkdv_kernel"), DKDV)
    keys = backward.of_keys(values, find_rows(values["K"], case.k, config.block_n)[1], key_program, lines)
    values, lines = named_values(recording.of_kernel("flash_bwd_dq_kernel"), DQ)
    head, start, _ = find_rows(values["Q"], case.q, config.block_m)
    return [keys, backward.of_queries(values, head, start, program, lines)]


def stored(gradient: torch.Tensor, head: int, start: int, block: int) -> np.ndarray:
    """A tile of what a kernel stored, [1, T, H, D]."""
    return simulate.tile(gradient[0, :, head], start, block).double().cpu().numpy()


def _inside(part: str, values: Values, rows: int) -> Values:
    """Only the rows that exist: of a key tile the keys (columns of scores), of a query tile the queries."""
    result = {}
    for name, x in values.items():
        base = split_step(name)[0].removesuffix("_final")
        if part == "dkdv":
            result[name] = (
                x[:rows] if base in ("K", "V", "dK", "dV") else x[:, :rows] if base in ("S", "P", "dP", "dS") else x
            )
        else:
            result[name] = x if base in ("K", "V") else x[:rows]
    return result
