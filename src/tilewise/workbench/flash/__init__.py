"""Flash attention, for the workbench."""

from tilewise.workbench.operator import Missing, Operator

FLASH = Operator(
    name="flash",
    summary="dense FlashAttention: softmax(q kᵀ) v",
    function="tilewise.ops.flash.api:flash_attention",
    reference="tilewise.ops.flash.reference:flash_attention",
    suite="tilewise.workbench.flash.cases:SUITE",
    configs="tilewise.workbench.flash.configs:CONFIGURATIONS",
    trace="tilewise.workbench.flash.trace:TRACE",
    bench="tilewise.workbench.flash.cases:BENCHMARK",
    launches="tilewise.workbench.flash.inspect:LAUNCHES",
    audit=("tilewise.workbench.flash.inspect:audit_cases",),
    over_ranks="tilewise.workbench.flash.ranks:OVER_RANKS",
)
HOPPER = Operator(
    name="flash-hopper",
    summary="its kernels for Hopper alone",
    function=FLASH.function,
    reference=FLASH.reference,
    suite=Missing("flash's cases run them on such a GPU: verify flash"),
    configs="tilewise.workbench.flash.configs_hopper:CONFIGURATIONS",
    trace="tilewise.workbench.flash.trace_hopper:TRACE",
    bench=Missing("flash takes them on such a GPU: bench flash"),
    launches="tilewise.workbench.flash.inspect:HOPPER",
    audit=Missing("flash's audit has them too: inspect flash --audit"),
    part_of="flash",
)
DECODE = Operator(
    name="flash-decode",
    summary="attention over a cache, dense or in pages, which new keys are written into",
    function="tilewise.workbench.flash.decode.calls:attend",
    reference="tilewise.workbench.flash.decode.calls:reference",
    suite="tilewise.workbench.flash.decode.cases:SUITE",
    configs="tilewise.workbench.flash.decode.configs:CONFIGURATIONS",
    trace="tilewise.workbench.flash.decode.trace:TRACE",
    bench="tilewise.workbench.flash.decode.bench:BENCHMARK",
    launches="tilewise.workbench.flash.decode.inspect:LAUNCHES",
    audit=("tilewise.workbench.flash.decode.inspect:audit_cases",),
)
