"""Block-sparse attention for HSTU, for the workbench."""

from tilewise.workbench.operator import Missing, Operator

BSA = Operator(
    name="bsa",
    summary="block-sparse attention for HSTU: compressed, chosen and near keys, through SiLU and layer norm",
    function="tilewise.ops.bsa.api:block_sparse_attn",
    reference="tilewise.ops.bsa.reference:block_sparse_attn",
    suite="tilewise.workbench.bsa.cases:SUITE",
    configs="tilewise.workbench.bsa.configs:CONFIGURATIONS",
    trace="tilewise.workbench.bsa.trace:TRACE",
    bench="tilewise.workbench.bsa.cases:BENCHMARK",
    launches="tilewise.workbench.bsa.inspect:LAUNCHES",
    audit=("tilewise.workbench.bsa.inspect:audit_cases",),
)
HSTU_BSA = Operator(
    name="hstu-bsa",
    summary="the same as an HSTU layer calls it: packed sequences, gates by a model of the padded queries",
    function="tilewise.ops.bsa.hstu_bsa:hstu_attention_with_bsa",
    reference="tilewise.ops.bsa.reference:hstu_attention_with_bsa",
    suite="tilewise.workbench.bsa.cases_hstu:SUITE",
    configs=Missing("it takes the tiles of bsa: run those"),
    trace=Missing("it launches the kernels of bsa: trace that"),
    bench=Missing("it is bsa and a model of gates, which is the caller's: bench bsa"),
    launches="tilewise.workbench.bsa.inspect:HSTU_BSA",
    audit=("tilewise.workbench.bsa.inspect:audit_cases",),
    part_of="bsa",
)
