"""HSTU attention on the CPU: tile by tile, sequence by sequence, so that no score matrix is ever whole."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_M = 128
BLOCK_N = 512
# The accumulators' dtype and device, independent of torch's defaults.
_STATE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True)
class Options:
    """A call's options besides the tensors, as in the public call."""

    max_seq_len: int
    alpha: float
    causal: bool
    max_attn_len: int
    contextual_seq_len: int


@dataclass(frozen=True)
class _Mask:
    """Which pairs of one sequence take part: the tokens' ids, by which distances are counted, and the id at which
    targets begin.
    """

    ids: torch.Tensor
    end: int
    options: Options

    def keep(self, rows: slice, keys: slice) -> torch.Tensor:
        """[rows, keys], True where the key takes part for the query."""
        id_m, id_n = self.ids[rows, None], self.ids[None, keys]
        distance = id_m - id_n
        if not self.options.causal:
            distance = distance.abs()
        keep = distance > 0
        keep |= torch.arange(rows.start, rows.stop, device="cpu")[:, None] == torch.arange(
            keys.start, keys.stop, device="cpu"
        )
        if self.options.max_attn_len > 0:
            keep &= distance <= self.options.max_attn_len
        if self.options.contextual_seq_len > 0:
            keep |= (id_m == 0) & (id_n < self.end)
        return keep


def _mask(tokens: int, targets: int, options: Options) -> _Mask:
    """That of a sequence; a number of 0 targets says the same as none given."""
    # The contextual tokens share the id of the last of them, 0.
    before = max(options.contextual_seq_len - 1, 0)
    end = tokens - before - targets
    return _Mask((torch.arange(tokens, device="cpu") - before).clamp(min=0).clamp(max=end), end, options)


@dataclass(frozen=True)
class _Tile:
    """One tile of one sequence: its keys, which pairs take part, and the scores [H, rows, keys], 0 where a pair does
    not.
    """

    keys: slice
    keep: torch.Tensor
    scores: torch.Tensor


def _rows(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """Rows of [T, H, D] as fp32 [H, rows, D]."""
    return x[rows].float().transpose(0, 1)


def _slices(tokens: int, block: int) -> Iterator[slice]:
    yield from (slice(start, min(start + block, tokens)) for start in range(0, tokens, block))


def _tiles(b_q: torch.Tensor, k: torch.Tensor, rows: slice, mask: _Mask) -> Iterator[_Tile]:
    """The tiles of keys of which the queries `rows` see any."""
    for keys in _slices(k.shape[0], BLOCK_N):
        keep = mask.keep(rows, keys)
        if bool(keep.any()):
            yield _Tile(keys, keep, (b_q @ _rows(k, keys).mT * mask.options.alpha).masked_fill(~keep, 0.0))


def _forward_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, mask: _Mask) -> None:
    """Fill o [T, H, Dv] of one sequence."""
    for rows in _slices(q.shape[0], BLOCK_M):
        b_q = _rows(q, rows)
        acc = torch.zeros(*b_q.shape[:2], v.shape[-1], **_STATE)
        for tile in _tiles(b_q, k, rows, mask):
            acc += torch.nn.functional.silu(tile.scores) @ _rows(v, tile.keys)
        o[rows] = (acc / mask.options.max_seq_len).transpose(0, 1).to(o.dtype)


def _backward_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: _Mask,
) -> None:
    """Fill dq, dk, dv of one sequence, each [T, H, D]; dk and dv are summed over query tiles in fp32, in order."""
    dq, dk, dv = gradients
    acc_dk, acc_dv = (torch.zeros(x.shape[1], x.shape[0], x.shape[2], **_STATE) for x in (k, v))
    for rows in _slices(q.shape[0], BLOCK_M):
        # Every gradient is linear in the incoming one.
        b_q, b_do = _rows(q, rows), _rows(do, rows) / mask.options.max_seq_len
        acc_dq = torch.zeros(b_q.shape, **_STATE)
        for tile in _tiles(b_q, k, rows, mask):
            sigmoid = torch.sigmoid(tile.scores)
            slope = sigmoid * (1 + tile.scores * (1 - sigmoid))
            ds = (b_do @ _rows(v, tile.keys).mT * slope * mask.options.alpha).masked_fill(~tile.keep, 0.0)
            acc_dv[:, tile.keys] += (tile.scores * sigmoid).mT @ b_do
            acc_dk[:, tile.keys] += ds.mT @ b_q
            acc_dq += ds @ _rows(k, tile.keys)
        dq[rows] = acc_dq.transpose(0, 1).to(dq.dtype)
    dk.copy_(acc_dk.transpose(0, 1))
    dv.copy_(acc_dv.transpose(0, 1))


def _sequences(
    offsets: torch.Tensor, num_targets: torch.Tensor | None, options: Options
) -> Iterator[tuple[slice, _Mask]]:
    """Each sequence's rows and its mask."""
    targets = [0] * (offsets.shape[0] - 1) if num_targets is None else num_targets.tolist()
    for (start, stop), n in zip(itertools.pairwise(offsets.tolist()), targets, strict=True):
        yield slice(start, stop), _mask(stop - start, n, options)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Output [N, H, Dv] in q's dtype, contiguous."""
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    for rows, mask in _sequences(offsets, num_targets, options):
        _forward_sequence(q[rows], k[rows], v[rows], o[rows], mask)
    return o


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the inputs' dtype and contiguous."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v))
    for rows, mask in _sequences(offsets, num_targets, options):
        _backward_sequence(q[rows], k[rows], v[rows], do[rows], (dq[rows], dk[rows], dv[rows]), mask)
    return dq, dk, dv
