"""Dense attention as torch offers it: cuDNN, FlashAttention-2, its choice of fused kernels, FlexAttention; and
FlashAttention-4 where it is installed.

Counts the work: pairs of a query and a key that a mask keeps, and the FLOPs and bytes that follow.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.contender import Baseline, Call, CannotRunError, as_leaf
from tilewise.verify.suite import Problem, Tensors


def in_window(queries: int, keys: int, left: int, right: int) -> int:
    """For one sequence and one head: query i sees the keys from i + off - left to i + off + right, off = keys -
    queries, -1 for no limit.
    """
    position = torch.arange(queries) + (keys - queries)
    first = (position - left).clamp(0, keys) if left >= 0 else torch.zeros_like(position)
    last = (position + right + 1).clamp(0, keys) if right >= 0 else torch.full_like(position, keys)
    return int((last - first).clamp(min=0).sum())


def window_pairs(
    q: torch.Tensor, k: torch.Tensor, lengths: tuple[int, ...], left: int, right: int, lengths_k: tuple[int, ...] = ()
) -> int:
    """Of dense `[B, T, H, D]`, or packed sequences of `lengths`."""
    heads = q.shape[-2]
    if lengths:
        return heads * sum(
            in_window(queries, keys, left, right) for queries, keys in zip(lengths, lengths_k or lengths, strict=True)
        )
    return q.shape[0] * heads * in_window(q.shape[1], k.shape[1], left, right)


def causal_pairs(q: torch.Tensor, k: torch.Tensor) -> int:
    """Of dense `[B, T, H, D]` with the causal mask."""
    return window_pairs(q, k, (), -1, 0)


def in_blocks(position: torch.Tensor, indices: torch.Tensor, block: int) -> int:
    """Keys up to each query's own, in the blocks it names: `position` broadcasts against `indices`, whose last axis
    lists blocks, -1 for none.

    A block named twice counts once.
    """
    indices = indices.sort(-1).values
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[..., 1:] = indices[..., 1:] == indices[..., :-1]
    seen = (position - indices * block + 1).clamp(0, block)
    return int(torch.where((indices >= 0) & ~again, seen, 0).sum())


def ended_windows(tokens: int, size: int, stride: int) -> int:
    """Pairs of a query and a window of keys, one per `stride`, that has ended by then; of one sequence and one head."""
    position = torch.arange(tokens)
    whole = max(0, (tokens - size) // stride + 1)
    return int(((position + 1 - size).div(stride, rounding_mode="floor") + 1).clamp(0, whole).sum())


@dataclass(frozen=True)
class Work:
    """Pairs of a query and a key, channels of both, bytes of inputs, of outputs and of the inputs that
    have gradients.
    """

    pairs: int = 0
    channels: int = 0
    values: int = 0
    inputs: int = 0
    outputs: int = 0
    gradients: int = 0

    def operations(self, mode: str, pairs: int | None) -> int:
        """Forward: the score and its product with V; backward: the score again, and four more products.

        `pairs` replaces the operator's.
        """
        forward = 2 * (self.channels + self.values)
        backward = 2 * (3 * self.channels + 2 * self.values)
        return (self.pairs if pairs is None else pairs) * {
            "fwd": forward,
            "bwd": backward,
            "fwd+bwd": forward + backward,
        }[mode]

    def bytes(self, mode: str) -> int:
        """Forward: each input read once and each output written once; backward: both read, plus the incoming gradient,
        and gradients written.
        """
        forward = self.inputs + self.outputs
        backward = forward + self.outputs + self.gradients
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[mode]


def bytes_of(tensors: Tensors) -> int:
    """Total of all tensors."""
    return sum(x.numel() * x.element_size() for x in tensors.values())


@dataclass(frozen=True)
class Dense:
    """The dense attention requested: window limits as in `flash_attention` (causal is a right limit of 0), packed if
    `lengths` are given.
    """

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    scale: float | None = None
    lengths: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    sinks: bool = False


def fused(backend: SDPBackend | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Dense) -> Call:
    """torch's scaled_dot_product_attention over `[B, T, H, D]`, each tensor in its preferred layout; `backend` or
    torch's own choice.
    """
    if dense.lengths:
        raise CannotRunError("scaled_dot_product_attention takes no packed sequences")
    if dense.softcap:
        raise CannotRunError("scaled_dot_product_attention has no softcap")
    if dense.left >= 0 or dense.right > 0 or (dense.right == 0 and q.shape[1] != k.shape[1]):
        raise CannotRunError("scaled_dot_product_attention has no such window without a mask of all pairs")
    leaves = [as_leaf(x.transpose(1, 2)) for x in (q, k, v)]

    def run() -> tuple[torch.Tensor]:
        if backend is None:
            return (_attend(leaves, dense),)
        with sdpa_kernel(backend):
            return (_attend(leaves, dense),)

    return Call(_explained(run), leaves, lambda o: o.transpose(1, 2), causal_pairs(q, k) if dense.right == 0 else None)


def _attend(leaves: list[torch.Tensor], dense: Dense) -> torch.Tensor:
    q, k, v = leaves
    return scaled_dot_product_attention(
        q, k, v, is_causal=dense.right == 0, scale=dense.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _explained(run: Callable[[], tuple[torch.Tensor]]) -> Callable[[], tuple[torch.Tensor]]:
    """The same; if torch has no kernel, its warnings become the reason."""
    tried = False

    @functools.wraps(run)
    def explained() -> tuple[torch.Tensor]:
        nonlocal tried
        if tried:
            return run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = run()
            except RuntimeError as error:
                reasons = dict.fromkeys(str(warning.message).split(" (Triggered internally")[0] for warning in caught)
                raise CannotRunError("; ".join(reasons) or str(error).splitlines()[0]) from error
        tried = True
        return result

    return explained


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Dense) -> Call:
    """FlexAttention, compiled: packed sequences as documents of one row, windows by a block mask, softcap in its
    scores.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    packed = bool(dense.lengths)
    leaves = [as_leaf((x[None] if packed else x).transpose(1, 2)) for x in (q, k, v)]
    queries, keys = leaves[0].shape[2], leaves[1].shape[2]
    off = keys - queries
    if packed and dense.lengths_k not in ((), dense.lengths):
        raise CannotRunError(
            "packed queries and keys of different lengths are not written as a FlexAttention mask here"
        )
    document = torch.repeat_interleave(torch.tensor(dense.lengths or (queries,), device=q.device))

    def keep(_b: torch.Tensor, _h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = j >= 0
        if dense.right >= 0:
            seen = seen & (j <= i + off + dense.right)
        if dense.left >= 0:
            seen = seen & (j >= i + off - dense.left)
        return seen & (document[i] == document[j]) if packed else seen

    def cap(
        score: torch.Tensor, _b: torch.Tensor, _h: torch.Tensor, _i: torch.Tensor, _j: torch.Tensor
    ) -> torch.Tensor:
        return dense.softcap * torch.tanh(score / dense.softcap)

    mask = None
    if packed or dense.left >= 0 or dense.right >= 0:
        mask = create_block_mask(keep, None, None, queries, keys, device=str(q.device), BLOCK_SIZE=128)
    options = {
        "block_mask": mask,
        "scale": dense.scale,
        "enable_gqa": q.shape[-2] != k.shape[-2],
        "score_mod": cap if dense.softcap else None,
    }

    def run() -> tuple[torch.Tensor]:
        return (_compiled_flex()(*leaves, **options),)

    def lay_out(o: torch.Tensor) -> torch.Tensor:
        o = o.transpose(1, 2)
        return o[0] if packed else o

    return Call(run, leaves, lay_out, window_pairs(q, k, dense.lengths, dense.left, dense.right))


def flash_attn_4() -> ModuleType:
    """FlashAttention-4, imported once it is wanted: its DSL takes seconds to import."""
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise CannotRunError("FlashAttention-4 is not installed: pip install --pre flash-attn-4")
    return importlib.import_module("flash_attn.cute")


def fa4(deterministic: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dense: Dense) -> Call:
    """FlashAttention-4 in tilewise's own layout, `deterministic` with dQ summed in a fixed order.

    Limits of a GPU's architecture it reports itself when it is first called.
    """
    module = flash_attn_4()
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise CannotRunError("FlashAttention-4 takes fp16 and bf16 only")
    if any(x.shape[-1] % 8 for x in (q, v)):
        raise CannotRunError("FlashAttention-4 takes multiples of 8 channels only")
    leaves = [as_leaf(x) for x in (q, k, v)]
    options: dict[str, Any] = {
        "softmax_scale": dense.scale,
        "causal": dense.right == 0,
        "window_size": tuple(None if limit < 0 else limit for limit in (dense.left, dense.right)),
        "softcap": dense.softcap,
        "deterministic": deterministic,
    }
    attend = module.flash_attn_func
    if dense.lengths:
        attend = module.flash_attn_varlen_func
        for name, lengths in (("q", dense.lengths), ("k", dense.lengths_k or dense.lengths)):
            starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=q.device)
            options |= {f"cu_seqlens_{name}": starts, f"max_seqlen_{name}": max(lengths)}

    def run() -> tuple[torch.Tensor]:
        return (attend(*leaves, **options)[0],)

    pairs = window_pairs(q, k, dense.lengths, dense.left, dense.right, dense.lengths_k)
    return Call(run, leaves, pairs=pairs)


Builder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Dense], Call]
_KINDS: dict[str, tuple[str, Builder, tuple[str, ...]]] = {
    "cudnn": (
        "cuDNN's fused attention, through torch",
        functools.partial(fused, SDPBackend.CUDNN_ATTENTION),
        ("cuda",),
    ),
    "fa2": ("FlashAttention-2, through torch", functools.partial(fused, SDPBackend.FLASH_ATTENTION), ("cuda",)),
    "flash-attn-4": ("FlashAttention-4", functools.partial(fa4, False), ("cuda",)),
    "flash-attn-4-fixed": (
        "FlashAttention-4, its backward in a fixed order",
        functools.partial(fa4, True),
        ("cuda",),
    ),
    "sdpa": ("scaled_dot_product_attention, torch's own choice of kernel", functools.partial(fused, None), ("cpu",)),
    "flex": ("FlexAttention, compiled", flex, ("cuda",)),
}
NEEDS_GPU = ("cudnn", "fa2", "flash-attn-4", "flash-attn-4-fixed")


def baselines(describe: Callable[[Problem], Dense], dense: bool) -> tuple[Baseline, ...]:
    """All kinds of dense attention over a problem's q, k and v; `dense` if the operator itself is sparse."""

    def build(name: str, builder: Builder, problem: Problem, tensors: Tensors) -> Call:
        if name in NEEDS_GPU and tensors["q"].device.type != "cuda":
            raise CannotRunError("needs a CUDA GPU")
        dense = describe(problem)
        if dense.sinks:
            raise CannotRunError("is called without sinks here")
        return builder(tensors["q"], tensors["k"], tensors["v"], dense)

    return tuple(
        Baseline(
            f"dense-{name}" if dense else name,
            f"dense causal attention, {about}" if dense else about,
            functools.partial(build, name, builder),
            on,
            dense,
        )
        for name, (about, builder, on) in _KINDS.items()
    )
