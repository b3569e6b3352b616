"""A small problem of every operator, and what makes it run: shared by the tests of how operators are run."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

import tilewise
from tilewise.ops._host.register import Operator
from tilewise.ops.bsa import api as bsa
from tilewise.ops.flash import api as flash
from tilewise.ops.hstu import api as hstu
from tilewise.ops.nsa import api as nsa
from tilewise.ops.nsa import attend as nsa_attend
from tilewise.ops.nsa import steps as nsa_steps

ON_GPU = torch.cuda.is_available()
ON_HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
# Tokens of a problem. Kernels for Hopper take more than 128 keys.
TOKENS = 260 if ON_GPU else 29
# Calls of one problem: by the plan, by the template that the second makes, by that template again.
# The cpu backend has no templates.
REPEATS = 3 if ON_GPU else 1
# Blocks that a query selects: all there are. A choice that rounding turns round would compare as an error.
BLOCKS = 40 if ON_GPU else 4
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


class Kind(NamedTuple):
    """An operator with its options. Dense tensors are `[1, T, H, D]`, packed ones the same without the first axis."""

    module: ModuleType
    # Heads and channels of each tensor that is differentiated.
    tensors: tuple[tuple[int, ...], ...]
    # call(tensors, fixed, backend) -> output
    call: Callable[..., Any]
    packed: bool = False
    dtype: torch.dtype = torch.float32
    # fixed(tokens) -> tensors that are not differentiated
    fixed: Callable[[int], list[torch.Tensor]] = lambda tokens: []
    heads_first: bool = False


def offsets(tokens: int) -> list[torch.Tensor]:
    return [torch.tensor([0, tokens // 3, tokens // 3, tokens])]


def blocks(tokens: int) -> list[torch.Tensor]:
    """Indices and mask of `native_sparse_attend`."""
    chosen = torch.randint(0, -(-tokens // 8), (1, 1, tokens, 3), generator=torch.Generator().manual_seed(5))
    return [chosen, chosen % 3 != 1]


def call_flash(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    cu = fixed[0] if fixed else None
    return tilewise.flash_attention(*x, causal=True, cu_seqlens_q=cu, backend=backend)


def call_flash_with_sinks(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    *qkv, sinks = x
    return tilewise.flash_attention(*qkv, causal=True, cu_seqlens_q=fixed[0], sinks=sinks[0], backend=backend)


def call_nsa(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    q, k, v, g_cmp, g_slc, g_swa = x
    sizes = {"compress_size": 8, "compress_stride": 4, "block_size": 16, "block_count": BLOCKS, "window_size": 20}
    return tilewise.native_sparse_attention(q, k, v, g_cmp=g_cmp, g_slc=g_slc, g_swa=g_swa, **sizes, backend=backend)


def call_steps(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    q, k, v, k_cmp, v_cmp = x
    windows = {"compress_size": 8, "compress_stride": 4}
    # A window for every 4 tokens but the last ones.
    k_cmp, v_cmp = (y[:, : (q.shape[1] - 8) // 4 + 1] for y in (k_cmp, v_cmp))
    near = tilewise.compressed_attention(q, k_cmp, v_cmp, **windows, backend=backend)
    sizes = windows | {"block_size": 16, "block_count": BLOCKS}
    chosen = tilewise.select_blocks(q.detach(), k_cmp.detach(), **sizes, backend=backend)
    return near + tilewise.selected_attention(q, k, v, chosen, block_size=16, backend=backend)


def call_attend(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    q, k, v, sel_scale = x
    return tilewise.native_sparse_attend(q, k, v, 8, *fixed, sel_scale, backend=backend)


def call_hstu(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    return tilewise.hstu_attention(*x, fixed[0], max_seq_len=512, max_attn_len=40, backend=backend)


def call_bsa(x: Any, fixed: Any, backend: str) -> torch.Tensor:
    return tilewise.block_sparse_attn(*x, BLOCKS, 8, 9, seq_offsets=fixed[0], backend=backend)[0]


QKV = ((2, 32),) * 3
KINDS = {
    "flash": Kind(flash, ((4, 32), (2, 32), (2, 32)), call_flash),
    # Of the fourth tensor the first token's are the sinks.
    "flash-packed": Kind(flash, (*QKV, (2,)), call_flash_with_sinks, packed=True, fixed=offsets),
    "nsa": Kind(nsa, ((2, 16), (1, 16), (1, 16), (2,), (2,), (2,)), call_nsa),
    "nsa-steps": Kind(nsa_steps, ((2, 16), *((1, 16),) * 4), call_steps),
    "nsa-attend": Kind(nsa_attend, ((2, 16), (1, 16), (1, 16), (1, 3)), call_attend, fixed=blocks, heads_first=True),
    "hstu": Kind(hstu, QKV, call_hstu, packed=True, fixed=offsets),
    "bsa": Kind(bsa, (*((2, 16),) * 4, *((2,),) * 3), call_bsa, packed=True, fixed=offsets),
}
if ON_HOPPER:
    # Hopper's own kernels take 16 bits and 64 channels or more.
    wide = ((4, 64), (4, 64), (4, 64))
    KINDS["flash-hopper"] = Kind(flash, wide, call_flash, dtype=torch.bfloat16)
    KINDS["flash-hopper-packed"] = Kind(
        flash, (*wide, (4,)), call_flash_with_sinks, packed=True, dtype=torch.bfloat16, fixed=offsets
    )


class Problem(NamedTuple):
    """A call's tensors, and what calls."""

    leaves: list[torch.Tensor]
    do: torch.Tensor
    run: Callable[..., torch.Tensor]

    def on(self, leaves: list[torch.Tensor], do: torch.Tensor | None = None) -> "Problem":
        """The same call of other tensors."""
        return Problem(leaves, self.do if do is None else do, self.run)

    def step(self) -> list[torch.Tensor]:
        """Forward and backward: the output and all gradients."""
        o = self.run(*self.leaves)
        return [o.detach(), *torch.autograd.grad(o, self.leaves, self.do)]


def make(name: str, tokens: int = TOKENS, seed: int = 0, device: torch.device = DEVICE, backend: str = "") -> Problem:
    kind = KINDS[name]
    generator = torch.Generator().manual_seed(seed)
    rows = (tokens,) if kind.packed else (1, tokens)

    def fresh(shape: tuple[int, ...]) -> torch.Tensor:
        x = torch.randn(*rows, *shape, generator=generator)
        return (x.transpose(1, 2).contiguous() if kind.heads_first else x).to(device, kind.dtype)

    leaves = [fresh(shape).requires_grad_() for shape in kind.tensors]
    do = fresh((*kind.tensors[0][:-1], kind.tensors[2][-1]))
    fixed = [x.to(device) for x in kind.fixed(tokens)]
    chosen = backend or ("triton" if device.type == "cuda" else "cpu")
    return Problem(leaves, do, lambda *x: kind.call(x, fixed, chosen))


def expected(name: str, problem: Problem, **options: Any) -> list[torch.Tensor]:
    """The reference's results in fp64 for a problem's tensors."""
    wide = make(name, **options, device=problem.do.device, backend="reference")
    return wide.on([x.detach().double().requires_grad_() for x in problem.leaves], problem.do.double()).step()


def operators(name: str) -> list[Operator]:
    """Those of torch that a call goes through."""
    return [x for x in vars(KINDS[name].module).values() if isinstance(x, Operator)]
