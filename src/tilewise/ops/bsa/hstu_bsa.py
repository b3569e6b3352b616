"""`hstu_attention_with_bsa`: block-sparse attention as an HSTU layer calls it, with gates that a model makes of the
padded queries.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.register import register
from tilewise.ops.bsa.api import GATES, block_sparse_attn

GateModel = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def hstu_attention_with_bsa(
    num_heads: int,
    attention_dim: int,
    linear_dim: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    x_offsets: torch.Tensor,
    invalid_attn_mask: torch.Tensor,
    gate_model: GateModel,
    block_counts: int = 4,
    block_size: int = 32,
    window_size: int = 0,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block-sparse attention over packed sequences (see `block_sparse_attn`), its gates made by a model. Each sequence
    is computed as if alone.

    Args:
        num_heads, attention_dim, linear_dim: H heads; D channels of q and k, and Dv of v and u, in each. Heads share
            blocks in pairs where H is even.
        q, k: queries and keys `[N, H · D]`, all sequences end to end. fp16, bf16 or fp32.
        v, u: values, and what the sum of the branches is multiplied by, `[N, H · Dv]`.
        x_offsets: offsets `[B + 1]` of the sequences, int32 or int64, first 0, last N, never decreasing; a sequence may
            be empty.
        invalid_attn_mask: its last axis tells the padded length n, which no sequence may exceed; nothing else of it is
            read.
        gate_model: maps padded_q to three gates `[B, n, H]`, g_cmp, g_slc and g_swa, in q's dtype or fp32. Gradients
            reach what it is made of.
        block_counts, block_size, window_size, backend: as in `block_sparse_attn`.

    Returns:
        The output `[N, H · Dv]` in q's dtype; padded_q and padded_k, `[B, n, H, D]`, q and k with zeros beyond each
        sequence, differentiable too.

    Inside torch.autocast gate_model runs with it, and padded_q and padded_k keep q's and k's dtype. Values in x_offsets
    are checked on CPU tensors always, on CUDA tensors with TILEWISE_CHECK=1 (it costs a synchronisation).
    """
    for name, value in (("num_heads", num_heads), ("attention_dim", attention_dim), ("linear_dim", linear_dim)):
        checks.check_whole(value, name, 1)
    for name, x in (("q", q), ("k", k)):
        _check_rows(x, name, q, num_heads, attention_dim, "attention_dim")
    for name, x in (("v", v), ("u", u)):
        _check_rows(x, name, q, num_heads, linear_dim, "linear_dim")
    _check_padding(q, x_offsets, invalid_attn_mask)
    if not callable(gate_model):
        raise TypeError(
            f"gate_model is a {type(gate_model).__name__}: expected a function or module that maps padded_q to three"
            " gates [B, n, H]"
        )
    q, k = (x.unflatten(-1, (num_heads, attention_dim)) for x in (q, k))
    v, u = (x.unflatten(-1, (num_heads, linear_dim)) for x in (v, u))
    batch, length = x_offsets.shape[0] - 1, invalid_attn_mask.shape[-1]
    slots = bsa_slots(x_offsets.contiguous(), q.shape[0], length)

    def padded(x: torch.Tensor) -> torch.Tensor:
        room = torch.zeros(batch * length, *x.shape[1:], dtype=x.dtype, device=x.device)
        return room.index_copy(0, slots, x).unflatten(0, (batch, length))

    padded_q, padded_k = padded(q), padded(k)
    gates = _check_gates(gate_model(padded_q), padded_q)
    g_cmp, g_slc, g_swa = (gate.flatten(0, 1).index_select(0, slots) for gate in gates)
    o, _ = block_sparse_attn(
        q,
        k,
        v,
        u,
        g_cmp,
        g_slc,
        g_swa,
        block_counts,
        block_size,
        window_size,
        interleave=num_heads % 2 == 0,
        seq_offsets=x_offsets,
        backend=backend,
    )
    return o.flatten(1), padded_q, padded_k


def _check_rows(x: torch.Tensor, name: str, q: torch.Tensor, heads: int, channels: int, channels_name: str) -> None:
    """Shape and device of q, or of what goes with it; the rest is `block_sparse_attn`'s to check."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if x.dim() != 2 or x.shape[1] != heads * channels:
        raise ValueError(
            f"{name} has shape {list(x.shape)}: expected [N, num_heads · {channels_name}], here {heads} · {channels} ="
            f" {heads * channels} channels"
        )
    if x.shape[0] != q.shape[0]:
        raise ValueError(f"{name} has {x.shape[0]} tokens and q has {q.shape[0]}: they must be equal")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q is on {q.device}: move them to one device")


def _check_padding(q: torch.Tensor, x_offsets: torch.Tensor, mask: torch.Tensor) -> None:
    """Offsets and a padded length that could hold q's tokens."""
    tokens = q.shape[0]
    checks.check_offsets_tensor(x_offsets, "x_offsets", q.device, tokens)
    if not isinstance(mask, torch.Tensor):
        raise TypeError(
            f"invalid_attn_mask is a {type(mask).__name__}: expected a torch.Tensor [..., n], n being the padded length"
        )
    if mask.dim() == 0:
        raise ValueError("invalid_attn_mask has no axes: expected [..., n], n being the padded length")
    batch, length = x_offsets.shape[0] - 1, mask.shape[-1]
    # Unchecked offsets then have a slot for every token, right or wrong.
    if tokens > batch * length:
        raise ValueError(
            f"invalid_attn_mask.size(-1) is {length} and there are {tokens} tokens in {batch} sequences: it must be at"
            " least the longest one's length"
        )


def _check_gates(gates: Any, padded_q: torch.Tensor) -> Sequence[torch.Tensor]:
    """What gate_model returned; dtypes, which autocast may still change, are `block_sparse_attn`'s to check."""
    if not isinstance(gates, (tuple, list)) or len(gates) != 3:
        came = f"{len(gates)} of them" if isinstance(gates, (tuple, list)) else f"a {type(gates).__name__}"
        raise TypeError(f"gate_model returned {came}: expected three gates [B, n, H], {', '.join(GATES)}")
    for name, gate in zip(GATES, gates, strict=True):
        if not isinstance(gate, torch.Tensor):
            raise TypeError(
                f"gate_model returned a {type(gate).__name__} for {name}: expected a torch.Tensor [B, n, H]"
            )
        if gate.shape != padded_q.shape[:-1]:
            raise ValueError(
                f"gate_model returned {name} of shape {list(gate.shape)}: expected [B, n, H], here"
                f" {list(padded_q.shape[:-1])}"
            )
        if gate.device != padded_q.device:
            raise ValueError(
                f"gate_model returned {name} on {gate.device} and q is on {padded_q.device}: move the model there"
            )
    return gates


def _run_slots(offsets: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Where each packed token lies among B · length padded ones, int64 [tokens]: made on the device, without a
    synchronisation.
    """
    checks.check_offset_values(offsets, "x_offsets", tokens, length, "invalid_attn_mask.size(-1)")
    token = torch.arange(tokens, dtype=offsets.dtype, device=offsets.device)
    # The last sequence that begins no later: an empty one begins where the next does. Unchecked offsets must not lead
    # out of bounds.
    sequence = (torch.searchsorted(offsets, token, right=True) - 1).clamp(0, max(offsets.shape[0] - 2, 0))
    position = (token - offsets[sequence]).clamp(0, max(length - 1, 0))
    return sequence * length + position


def _fake_slots(offsets: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    return torch.empty(tokens, dtype=torch.int64, device=offsets.device)


# A separate operator, so that torch.compile does not trace the check of values.
bsa_slots = register("bsa_slots(Tensor offsets, SymInt tokens, SymInt length) -> Tensor", _run_slots, _fake_slots)
