"""Flash attention, for the workbench."""

from tilewise.workbench.operator import Operator

FLASH = Operator(
    name="flash",
    summary="dense FlashAttention: softmax(q kᵀ) v",
    function="tilewise.ops.flash.api:flash_attention",
    reference="tilewise.ops.flash.reference:flash_attention",
    suite="tilewise.workbench.flash.cases:SUITE",
    trace="tilewise.workbench.flash.trace:TRACE",
    bench="tilewise.workbench.flash.bench:BENCHMARK",
)
