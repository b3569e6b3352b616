"""Native sparse attention and its branches, for the workbench."""

from tilewise.workbench.operator import Missing, Operator

NSA = Operator(
    name="nsa",
    summary="native sparse attention: compressed, selected and near keys, gated",
    function="tilewise.ops.nsa.api:native_sparse_attention",
    reference="tilewise.ops.nsa.reference:native_sparse_attention",
    suite="tilewise.workbench.nsa.cases:SUITE",
    configs=Missing("its branches have tables of their own: run nsa-compressed and nsa-selected"),
    trace=Missing("its branches are traced one at a time: trace nsa-compressed or nsa-selected"),
    bench="tilewise.workbench.nsa.bench:NSA",
    launches="tilewise.workbench.nsa.inspect:WHOLE",
    audit=(
        "tilewise.workbench.nsa.inspect:audit_compressed",
        "tilewise.workbench.nsa.inspect:audit_choose",
        "tilewise.workbench.nsa.inspect:audit_selected",
        "tilewise.workbench.nsa.inspect:audit_combine",
        "tilewise.workbench.nsa.decode.inspect:audit_steps",
    ),
    over_ranks="tilewise.workbench.nsa.ranks:OVER_RANKS",
)
COMPRESSED = Operator(
    name="nsa-compressed",
    summary="its compressed branch: attention to windows of keys",
    function="tilewise.ops.nsa.api:compressed_attention",
    reference="tilewise.ops.nsa.reference:compressed_attention",
    suite="tilewise.workbench.nsa.cases_compressed:SUITE",
    configs="tilewise.workbench.nsa.configs:COMPRESSED",
    trace="tilewise.workbench.nsa.trace:COMPRESSED",
    bench="tilewise.workbench.nsa.bench:COMPRESSED",
    launches="tilewise.workbench.nsa.inspect:COMPRESSED",
    audit=("tilewise.workbench.nsa.inspect:audit_compressed",),
    part_of="nsa",
)
SELECTED = Operator(
    name="nsa-selected",
    summary="its selected branch: attention to the blocks that each token names",
    function="tilewise.ops.nsa.api:selected_attention",
    reference="tilewise.ops.nsa.reference:selected_attention",
    suite="tilewise.workbench.nsa.cases_selected:SUITE",
    configs="tilewise.workbench.nsa.configs:SELECTED",
    trace="tilewise.workbench.nsa.trace:SELECTED",
    bench="tilewise.workbench.nsa.bench:SELECTED",
    launches="tilewise.workbench.nsa.inspect:SELECTED",
    audit=("tilewise.workbench.nsa.inspect:audit_selected",),
    part_of="nsa",
)
ATTEND = Operator(
    name="nsa-attend",
    summary="native_sparse_attend, as native-sparse-attention-pytorch has it",
    function="tilewise.ops.nsa.attend:native_sparse_attend",
    reference="tilewise.ops.nsa.reference:native_sparse_attend",
    suite="tilewise.workbench.nsa.cases_attend:SUITE",
    configs=Missing("it takes the tiles of nsa-selected: run those"),
    trace=Missing("it launches the kernels of nsa-selected: trace that"),
    bench=Missing("it launches the kernels of nsa-selected: bench that"),
    launches="tilewise.workbench.nsa.inspect:ATTEND",
    audit=("tilewise.workbench.nsa.inspect:audit_attend",),
)
