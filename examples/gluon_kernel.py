"""Attention in Gluon for Hopper, forward only, and three mistakes in it, two of which a GPU shows late or never.

tilewise verify flash --impl examples/gluon_kernel.py:attention --no-grad --config T=300,H=2,D=64

docs/gluon.md finds all three, on a machine without a GPU.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_M, BLOCK_N, STAGES = 64, 64, 2
# Names that Triton 3.9 has changed.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def fetch(
    q, k, v, buffers, barriers, i_b, i_h, i_m, n_steps, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    MISTAKE: gl.constexpr,
):  # fmt: skip
    """One warp: Q, then K and V step by step, each once its buffers are empty."""
    q_tile, k_tiles, v_tiles = buffers
    q_full, full, empty = barriers
    mbarrier.expect(q_full.index(0), q.block_type.nbytes)
    tma_load(q, [i_b, i_h, i_m, 0], q_full.index(0), q_tile.index(0))
    for i in range(n_steps):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        # A new barrier lets a wait for the phase before its first pass.
        mbarrier.wait(empty.index(stage), phase if MISTAKE == "phase" else phase ^ 1)
        mbarrier.expect(full.index(stage), k.block_type.nbytes + v.block_type.nbytes)
        tma_load(k, [i_b, i_h, i * BLOCK_N, 0], full.index(stage), k_tiles.index(stage))
        tma_load(v, [i_b, i_h, i * BLOCK_N, 0], full.index(stage), v_tiles.index(stage))


@gluon.jit
def attend(
    o, buffers, barriers, i_m, n_queries, n_keys, n_steps, scale_log2, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, MISTAKE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: the online softmax over all keys, for 64 queries."""
    q_tile, k_tiles, v_tiles = buffers
    q_full, full, empty = barriers
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
    l = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, S_LAYOUT))
    acc = gl.zeros([BLOCK_M, D], gl.float32, O_LAYOUT)
    b_q = q_tile.index(0).reshape([BLOCK_M, D])
    mbarrier.wait(q_full.index(0), 0)
    for i in range(n_steps):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(full.index(stage), phase)
        b_k = k_tiles.index(stage).reshape([BLOCK_N, D])
        b_v = v_tiles.index(stage).reshape([BLOCK_N, D])
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
        b_s = warpgroup_mma(b_q, b_k.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,)) * scale_log2
        o_n = i * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        b_s = gl.where(gl.expand_dims(o_n, 0) < n_keys, b_s, float("-inf"))
        m_new = gl.maximum(m, gl.max(b_s, 1))
        rescale = gl.exp2(m - m_new)
        b_p = gl.exp2(b_s - gl.expand_dims(m_new, 1))
        l = l * rescale + gl.sum(b_p, 1)
        m = m_new
        if MISTAKE != "rescale":
            acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT)), 1)
        operand = gl.convert_layout(b_p.to(b_v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        running = warpgroup_mma(operand, b_v, acc, is_async=True)
        if MISTAKE == "early":
            mbarrier.arrive(empty.index(stage), count=1)
        acc = warpgroup_mma_wait(0, deps=(running,))
        if MISTAKE != "early":
            mbarrier.arrive(empty.index(stage), count=1)
    b_o = acc / gl.expand_dims(gl.convert_layout(l, gl.SliceLayout(1, O_LAYOUT)), 1)
    o_m = i_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, O_LAYOUT))
    o_d = gl.arange(0, D, gl.SliceLayout(0, O_LAYOUT))
    places = gl.expand_dims(o_m * D, 1) + gl.expand_dims(o_d, 0)
    gl.store(o + places, b_o.to(o.dtype.element_ty), mask=gl.expand_dims(o_m, 1) < n_queries)


@gluon.jit
def attention_kernel(
    q, k, v, o, n_heads, n_queries, n_keys, scale_log2, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, MISTAKE: gl.constexpr,
):  # fmt: skip
    # Grid: one CTA per query tile and head.
    # Owns: 64 queries of one head.
    # Loops over: tiles of 64 keys, which another warp fetches.
    # Writes: its rows of o.
    D: gl.constexpr = q.block_type.shape[3]
    i_m = gl.program_id(0) * BLOCK_M
    i_b = gl.program_id(1) // n_heads
    i_h = gl.program_id(1) % n_heads
    q_tile = gl.allocate_shared_memory(q.dtype, [1, 1, 1, BLOCK_M, D], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, BLOCK_N, D], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, BLOCK_N, D], v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    buffers = (q_tile, k_tiles, v_tiles)
    barriers = (q_full, full, empty)
    n_steps = gl.cdiv(n_keys, BLOCK_N)
    p_o = o + gl.program_id(1).to(gl.int64) * n_queries * D
    gl.warp_specialize(
        [
            (attend, (p_o, buffers, barriers, i_m, n_queries, n_keys, n_steps, scale_log2, BLOCK_M, BLOCK_N, D,
                      STAGES, MISTAKE)),
            (fetch, (q, k, v, buffers, barriers, i_b, i_h, i_m, n_steps, BLOCK_N, STAGES, MISTAKE)),
        ],
        [1],
        [24],
    )  # fmt: skip


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """For tiles of rows of one head of `[B, T, H, D]`."""
    batch, tokens, heads, channels = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    block = [1, 1, rows, channels]
    layout = gl.NVMMASharedLayout.get_default_for(
        block, {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[x.dtype]
    )
    return TensorDescriptor(x, [batch, heads, tokens, channels], [stride_b, stride_h, stride_t, 1], block, layout)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, mistake: str) -> torch.Tensor:
    batch, n_queries, heads, channels = q.shape
    scale = channels**-0.5 if scale is None else scale
    o = torch.empty(batch, heads, n_queries, channels, dtype=q.dtype, device=q.device)
    grid = -(-n_queries // BLOCK_M), batch * heads
    tiles = _descriptor(q, BLOCK_M), _descriptor(k, BLOCK_N), _descriptor(v, BLOCK_N)
    sizes = heads, n_queries, k.shape[1], scale * 1.4426950408889634
    attention_kernel[grid](*tiles, o, *sizes, BLOCK_M, BLOCK_N, STAGES, mistake, num_warps=4)
    return o.transpose(1, 2)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """Right, for D of 64 or 128 in fp16 and bf16."""
    return _run(q, k, v, scale, "none")


def waits_for_the_wrong_phase(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """The fetching warp waits for the wrong parity: that a buffer be released before it has been filled."""
    return _run(q, k, v, scale, "phase")


def releases_early(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> torch.Tensor:
    """K and V are released while the product with V may still read them."""
    return _run(q, k, v, scale, "early")


def forgets_to_rescale(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """The output so far stays relative to the old maximum of the scores."""
    return _run(q, k, v, scale, "rescale")
