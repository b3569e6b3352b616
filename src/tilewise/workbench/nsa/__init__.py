"""Native sparse attention and its branches, for the workbench."""

from tilewise.workbench.operator import Operator

NSA = Operator(
    name="nsa",
    summary="native sparse attention: compressed, selected and near keys, gated",
    function="tilewise.ops.nsa.api:native_sparse_attention",
    reference="tilewise.ops.nsa.reference:native_sparse_attention",
    suite="tilewise.workbench.nsa.cases:SUITE",
)
COMPRESSED = Operator(
    name="nsa-compressed",
    summary="its compressed branch: attention to windows of keys",
    function="tilewise.ops.nsa.api:compressed_attention",
    reference="tilewise.ops.nsa.reference:compressed_attention",
    suite="tilewise.workbench.nsa.cases_compressed:SUITE",
)
SELECTED = Operator(
    name="nsa-selected",
    summary="its selected branch: attention to the blocks that each token names",
    function="tilewise.ops.nsa.api:selected_attention",
    reference="tilewise.ops.nsa.reference:selected_attention",
    suite="tilewise.workbench.nsa.cases_selected:SUITE",
)
ATTEND = Operator(
    name="nsa-attend",
    summary="native_sparse_attend, as native-sparse-attention-pytorch has it",
    function="tilewise.ops.nsa.attend:native_sparse_attend",
    reference="tilewise.ops.nsa.reference:native_sparse_attend",
    suite="tilewise.workbench.nsa.cases_attend:SUITE",
)
