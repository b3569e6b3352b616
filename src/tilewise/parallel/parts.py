"""Calls of attention on one process: some of a rank's queries over some keys, and the gradients of such parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise.ops.flash.api import flash_backward, flash_forward
from tilewise.parallel.calls import Call
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.flash import Options

Tensor = torch.Tensor


def attend(
    call: Call, rows: Rows, options: Options, q: Tensor, here: Sequence[Tensor], sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of the call's queries, over its part of the keys and values that are here."""
    k_rows, v_rows = (rows.take(x, call.keys) for x in here)
    arguments = (rows.take(q, call.rows), k_rows, v_rows, call.cu_q, call.cu_k, sinks)
    o, lse = flash_forward.call_checked(arguments, (None, None, 0, *options.of(call)))
    return o, lse


def differentiate(
    calls: Sequence[Call],
    rows: Rows,
    options: Options,
    given: Sequence[Any],
    here: Sequence[Tensor],
    some_sinks: Sequence[Tensor | None] = (None, None),
) -> list[Tensor]:
    """Add to dq and dsinks, from do, q, o, dlse, lse, the keys and values that are here and sinks; returns the
    gradients of keys and values. Parts of several calls are added in fp32, in order.
    """
    (dq, do, q, o, dlse, lse), (sinks, dsinks) = given, some_sinks
    totals = [torch.zeros_like(x, dtype=x.dtype if len(calls) == 1 else torch.float32) for x in here]
    for call in calls:
        do_rows, q_rows, o_rows = (rows.take(x, call.rows) for x in (do, q, o))
        dlse_rows, lse_rows = (None if x is None else rows.take_lse(x, call.rows) for x in (dlse, lse))
        k_rows, v_rows = (rows.take(x, call.keys) for x in here)
        arguments = (do_rows, dlse_rows, q_rows, k_rows, v_rows, o_rows, lse_rows, call.cu_q, call.cu_k, sinks)
        dq_part, *parts, dsinks_part = flash_backward.call_checked(arguments, options.of(call))
        rows.add(dq, call.rows, dq_part)
        for total, part in zip(totals, parts, strict=True):
            rows.take(total, call.keys).add_(part)
        if dsinks is not None:
            dsinks += dsinks_part
    return [total.to(x.dtype) for total, x in zip(totals, here, strict=True)]
