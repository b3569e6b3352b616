"""`ContextPlan`: one batch's sequences over the ranks of a process group."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.ops._host.register import uncompiled
from tilewise.ops.flash.api import flash_attention
from tilewise.ops.nsa.api import GATES, native_sparse_attention
from tilewise.ops.nsa.problem import Sizes, check_compression
from tilewise.parallel import flash, nsa
from tilewise.parallel.assignment import (
    Balance,
    assign,
    checked_offsets,
    everything,
    needed,
    numbers,
    planning,
    sums,
)
from tilewise.parallel.calls import Range, Segment
from tilewise.parallel.exchange import Exchange, Fetch, explained
from tilewise.parallel.windows import Layout, Windows

Tensor = torch.Tensor
Method = Literal["all_gather", "ring"]


class ContextPlan:
    """Which rank of a group holds which tokens of a batch. Make one for each batch, on every rank alike, and give it to
    all layers: `flash_attention(q, k, v, parallel=plan)`.

    Args:
        group: a torch.distributed process group, or one dimension of a DeviceMesh.
        seq_len: tokens of each sequence of a dense batch `[B, T, ...]`.
        cu_seqlens: or offsets `[B + 1]` of packed sequences.
        balance: "head_tail" cuts each sequence into 2w chunks and gives rank r the chunks r and 2w-1-r, so that causal
            work is equal; "contiguous" into w; or an int64 tensor with every token's rank, such as `balanced` makes.
        method: how keys reach other ranks' queries: "all_gather", those that are seen, a few KV heads at a time; or
            "ring", passed on from rank to rank, in less memory.

    Local tensors hold this rank's tokens alone, in ascending order, sequence after sequence, without padding: as many
    as `local_tokens`, which may differ between ranks, and be 0.

    Attributes:
        local_tokens: how many tokens this rank holds, of each sequence of a dense batch.
        position_ids: int64 `[local_tokens]`: the position of each in its sequence.
        local_cu_seqlens: int32 offsets of the local tokens of each packed sequence; None where dense.
    """

    @planning
    def __init__(
        self,
        group: Any,
        *,
        seq_len: int | None = None,
        cu_seqlens: Tensor | None = None,
        balance: Balance | Tensor = "head_tail",
        method: Method = "all_gather",
    ) -> None:
        self.group = _process_group(group)
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if method not in ("all_gather", "ring"):
            raise ValueError(f"method is {method!r}: expected 'all_gather' or 'ring'")
        self.method = method
        self.packed = cu_seqlens is not None
        self.offsets = _offsets(seq_len, cu_seqlens)
        self.tokens = self.offsets[-1]
        self._bounds = torch.tensor(self.offsets)
        self._runs = assign(self._bounds, self.world, _check_balance(balance, self.tokens, self.world))
        self.device = _device(group, self.group)
        self.counts: list[int] = sums(self._runs.stops - self._runs.starts, self._runs.ranks, self.world).tolist()
        self.local_tokens = self.counts[self.rank]
        mine = self._runs.on(self.rank)
        begins = self._bounds[mine.sequences]
        self.position_ids = numbers(mine.starts - begins, mine.stops - begins).to(self.device)
        self.local_cu_seqlens = None
        if self.packed:
            lengths = sums(mine.stops - mine.starts, mine.sequences + 1, len(self.offsets))
            self.local_cu_seqlens = lengths.cumsum(0).to(self.device, torch.int32)
        sequences = f"{len(self.offsets) - 1} packed sequences" if self.packed else f"seq_len {self.tokens}"
        # Another assignment or other offsets have another number.
        digest = hashlib.blake2b(repr(self.offsets).encode(), digest_size=4)
        for x in (self._runs.starts, self._runs.ranks):
            digest.update(x.numpy().tobytes())
        self._described = f"plan {digest.hexdigest()} of {sequences}, {method}"
        self._exchanges: dict[tuple[tuple[int, int] | None, torch.device], Exchange] = {}
        self._rows: dict[torch.device, Tensor] = {}
        self._segments: dict[int, list[Segment]] = {}
        self._agreed: set[str] = set()
        # What calls of attention have worked out from this plan, by what it depends on.
        self.kept: dict[tuple[Any, ...], Any] = {}

    def __repr__(self) -> str:
        return f"ContextPlan(rank {self.rank} of {self.world}, {self.local_tokens} tokens here: {self._described})"

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that every rank holds whole. The gradient is partial: this rank's in its
        place, zeros elsewhere.
        """
        if x.shape[dim] != self.tokens:
            raise ValueError(f"x has {x.shape[dim]} tokens in axis {dim}: the plan is for {self.tokens}")
        return x.index_select(dim, self._mine(x.device))

    @uncompiled
    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole tensor on every rank, from all ranks' local ones. Its gradients are summed over the ranks."""
        dim %= x.dim()
        self.check_local(x, "x", dim)
        shape = [*x.shape[:dim], "tokens", *x.shape[dim + 1 :]]
        differentiated = torch.is_grad_enabled() and x.requires_grad
        self.agree(f"unshard of {shape} {x.dtype}{', differentiated' if differentiated else ''}", x.device)
        return Fetch.apply(x.transpose(0, dim), self.exchange(None, x.device)).transpose(0, dim)

    def flash_attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE of flash_attention's `parallel=`: local tensors, over the whole sequences."""
        if self.world == 1:
            self._check_whole(q)
            cu = None if self.local_cu_seqlens is None else self.local_cu_seqlens.to(q.device)
            o, lse = flash_attention(q, k, v, **options, cu_seqlens_q=cu, return_lse=True)
            return o, lse
        return flash.attend(self, q, k, v, **options)

    def native_sparse_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: nsa.Gates,
        k_cmp: Tensor | None,
        v_cmp: Tensor | None,
        sizes: Sizes,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and chosen blocks of native_sparse_attention's `parallel=`: local tensors, over whole sequences."""
        if self.world == 1:
            self._check_whole(q)
            cu = None if self.local_cu_seqlens is None else self.local_cu_seqlens.to(q.device)
            named = dict(zip(GATES, gates, strict=True)) | sizes._asdict() | options
            result = native_sparse_attention(q, k, v, k_cmp=k_cmp, v_cmp=v_cmp, cu_seqlens=cu, **named)
            return result if isinstance(result, tuple) else (result, None)
        return nsa.attend(self, q, k, v, gates=gates, k_cmp=k_cmp, v_cmp=v_cmp, sizes=sizes, **options)

    def windows(self, size: int, stride: int) -> Windows:
        """The windows of native sparse attention's compression, where a module makes their keys and values: each rank
        makes those that begin with a token of its own.
        """
        check_compression(size, stride)
        key = "windows", size, stride
        if key not in self.kept:
            self.kept[key] = Layout(self, self._runs, self._bounds, size, stride)
        return Windows(self, self.kept[key], f"{size} tokens every {stride}")

    def check_local(self, x: Tensor, name: str, dim: int) -> None:
        """That x holds this rank's tokens."""
        if x.shape[dim] != self.local_tokens:
            raise ValueError(
                f"{name} has {x.shape[dim]} tokens in axis {dim} (got shape {list(x.shape)}): rank {self.rank} of the"
                f" plan holds {self.local_tokens}; use plan.shard"
            )

    def _check_whole(self, q: Any) -> None:
        """That a plan of one process is for q; all else is the operators' own to check."""
        axes = 3 if self.packed else 4
        if isinstance(q, Tensor) and q.dim() == axes:
            self.check_local(q, "q", axes - 3)

    def segments(self, rank: int) -> list[Segment]:
        """A rank's tokens."""
        if rank not in self._segments:
            runs = self._runs.on(rank)
            begins = self._bounds[runs.sequences]
            columns = runs.sequences, runs.starts - begins, runs.stops - begins, runs.rows
            self._segments[rank] = [Segment(*row) for row in zip(*(x.tolist() for x in columns), strict=True)]
        return self._segments[rank]

    def needs(self, window: tuple[int, int]) -> list[Range]:
        """The keys that this rank's queries see under a window, in ranges that do not touch."""
        ranges = needed(self._runs, self._bounds, *window).of(self.rank)
        begins = self._bounds[ranges.sequences]
        columns = ranges.sequences, ranges.starts - begins, ranges.stops - begins
        return [Range(*row) for row in zip(*(x.tolist() for x in columns), strict=True)]

    @planning
    def exchange(self, window: tuple[int, int] | None, device: torch.device) -> Exchange:
        """Of the keys that each rank's queries see under a window; None: of all tokens."""
        key = window, device
        if key not in self._exchanges:
            all_tokens = everything(self.tokens, self.world)
            needs = all_tokens if window is None else needed(self._runs, self._bounds, *window)
            self._exchanges[key] = Exchange(self.group, self.rank, self.counts, self._runs, needs, device)
        return self._exchanges[key]

    @planning
    def _mine(self, device: torch.device) -> Tensor:
        if device not in self._rows:
            mine = self._runs.on(self.rank)
            self._rows[device] = numbers(mine.starts, mine.stops).to(device)
        return self._rows[device]

    def agree(self, call: str, device: torch.device) -> None:
        """Raise on every rank where they are not about to do the same: once for each kind of call."""
        if call in self._agreed:
            return
        text = f"{call}; {self._described}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
        all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
        with explained():
            dist.all_gather(all_of_them, mine, group=self.group)
        if len(set(torch.cat(all_of_them).tolist())) > 1:
            texts: list[Any] = [None] * self.world
            dist.all_gather_object(texts, text, group=self.group)
            lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the ranks of a ContextPlan make different calls, or have different plans:\n{lines}")
        self._agreed.add(call)


def _process_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call torch.distributed.init_process_group() first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(f"the mesh has {group.ndim} dimensions: give one of them, mesh[name] (got names {names})")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        # What torch's new_group gives to a process that is not one of its ranks.
        raise ValueError("this process is not in the group: make a ContextPlan on the group's own ranks alone")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: expected a process group or one dimension of a DeviceMesh")
    return group


def _device(given: Any, group: Any) -> torch.device:
    """Where a plan's own tensors are."""
    if isinstance(given, DeviceMesh):
        name = given.device_type
    else:
        # get_backend is "undefined" where torch chose one for each kind of device.
        on_gpus = "cuda:nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
        name = "cuda" if on_gpus else "cpu"
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _offsets(seq_len: int | None, cu_seqlens: Tensor | None) -> list[int]:
    if (seq_len is None) == (cu_seqlens is None):
        raise ValueError("expected seq_len, for a dense batch, or cu_seqlens, for packed sequences: give one of them")
    if cu_seqlens is None:
        if not isinstance(seq_len, int) or seq_len < 0:
            raise ValueError(f"seq_len is {seq_len!r}: expected a number of tokens")
        return [0, seq_len]
    return checked_offsets(cu_seqlens)


def _check_balance(balance: Balance | Tensor, tokens: int, world: int) -> Balance | Tensor:
    if isinstance(balance, str):
        if balance not in ("head_tail", "contiguous"):
            raise ValueError(f"balance is {balance!r}: expected 'head_tail', 'contiguous' or a tensor of ranks")
        return balance
    if not isinstance(balance, Tensor):
        raise TypeError(
            f"balance is a {type(balance).__name__}: expected 'head_tail', 'contiguous' or a tensor of ranks"
        )
    if balance.dtype != torch.int64 or tuple(balance.shape) != (tokens,):
        raise ValueError(
            f"balance is {balance.dtype} {list(balance.shape)}: expected each token's rank, int64 [{tokens}]"
        )
    if tokens and not 0 <= int(balance.min()) <= int(balance.max()) < world:
        raise ValueError(f"balance has ranks {int(balance.min())} to {int(balance.max())}: expected 0 to {world - 1}")
    return balance.cpu()
