"""Operators by name, for the workbench: where each keeps what the workbench needs, imported when it is asked for."""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operator:
    """One operator: its public function, its reference and its verification suite, as `module:name`."""

    name: str
    summary: str
    function: str
    reference: str
    suite: str

    def load(self, field: str) -> Any:
        """The object that `field` (function, reference, suite) names."""
        module, name = getattr(self, field).split(":")
        return getattr(importlib.import_module(module), name)


_OPERATORS = (
    Operator(
        name="flash",
        summary="dense FlashAttention: softmax(q kᵀ) v",
        function="tilewise.ops.flash.api:flash_attention",
        reference="tilewise.ops.flash.reference:flash_attention",
        suite="tilewise.verify.cases.flash:SUITE",
    ),
    Operator(
        name="nsa",
        summary="native sparse attention: compressed, selected and near keys, gated",
        function="tilewise.ops.nsa.api:native_sparse_attention",
        reference="tilewise.ops.nsa.reference:native_sparse_attention",
        suite="tilewise.verify.cases.nsa:SUITE",
    ),
    Operator(
        name="nsa-compressed",
        summary="its compressed branch: attention to windows of keys",
        function="tilewise.ops.nsa.api:compressed_attention",
        reference="tilewise.ops.nsa.reference:compressed_attention",
        suite="tilewise.verify.cases.nsa_compressed:SUITE",
    ),
    Operator(
        name="nsa-selected",
        summary="its selected branch: attention to the blocks that each token names",
        function="tilewise.ops.nsa.api:selected_attention",
        reference="tilewise.ops.nsa.reference:selected_attention",
        suite="tilewise.verify.cases.nsa_selected:SUITE",
    ),
    Operator(
        name="nsa-attend",
        summary="native_sparse_attend, as native-sparse-attention-pytorch has it",
        function="tilewise.ops.nsa.attend:native_sparse_attend",
        reference="tilewise.ops.nsa.reference:native_sparse_attend",
        suite="tilewise.verify.cases.nsa_attend:SUITE",
    ),
    Operator(
        name="hstu",
        summary="HSTU attention: SiLU(q kᵀ) v over packed sequences, with context and targets",
        function="tilewise.ops.hstu.api:hstu_attention",
        reference="tilewise.ops.hstu.reference:hstu_attention",
        suite="tilewise.verify.cases.hstu:SUITE",
    ),
    Operator(
        name="bsa",
        summary="block-sparse attention for HSTU: compressed, chosen and near keys, through SiLU and layer norm",
        function="tilewise.ops.bsa.api:block_sparse_attn",
        reference="tilewise.ops.bsa.reference:block_sparse_attn",
        suite="tilewise.verify.cases.bsa:SUITE",
    ),
    Operator(
        name="hstu-bsa",
        summary="the same as an HSTU layer calls it: packed sequences, gates by a model of the padded queries",
        function="tilewise.ops.bsa.hstu_bsa:hstu_attention_with_bsa",
        reference="tilewise.ops.bsa.reference:hstu_attention_with_bsa",
        suite="tilewise.verify.cases.hstu_bsa:SUITE",
    ),
)
OPERATORS = {operator.name: operator for operator in _OPERATORS}


def find(name: str) -> Operator:
    """The operator called `name`; a ValueError lists the names there are."""
    if name not in OPERATORS:
        raise ValueError(f"there is no operator {name!r}: expected one of {', '.join(OPERATORS)}")
    return OPERATORS[name]
