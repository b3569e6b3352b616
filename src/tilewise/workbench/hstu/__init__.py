"""HSTU attention, for the workbench."""

from tilewise.workbench.operator import Operator

HSTU = Operator(
    name="hstu",
    summary="HSTU attention: SiLU(q kᵀ) v over packed sequences, with context and targets",
    function="tilewise.ops.hstu.api:hstu_attention",
    reference="tilewise.ops.hstu.reference:hstu_attention",
    suite="tilewise.workbench.hstu.cases:SUITE",
    configs="tilewise.workbench.hstu.configs:CONFIGURATIONS",
    trace="tilewise.workbench.hstu.trace:TRACE",
    bench="tilewise.workbench.hstu.cases:BENCHMARK",
    launches="tilewise.workbench.hstu.inspect:LAUNCHES",
    audit=("tilewise.workbench.hstu.inspect:audit_cases",),
)
