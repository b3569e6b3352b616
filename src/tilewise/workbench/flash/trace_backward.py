"""Flash attention's backward: one program of each of its two kernels, recorded and simulated."""

from dataclasses import replace

import numpy as np
import torch

from tilewise.ops._device.records import Taps
from tilewise.ops.flash import configs, launch, simulate
from tilewise.ops.flash.simulate import Tiling
from tilewise.trace.record import record
from tilewise.trace.request import Traced, arrays, split_step
from tilewise.trace.values import Lines, Naming, Values, named_values
from tilewise.workbench.flash.trace_forward import HEADS, Case, find_rows

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
    """What both ways of tracing a backward share: the results that it starts from, its gradients, and the simulations
    beside them.
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
