"""A small kernel that Triton 3.6 miscompiles on Hopper: tiles of 64 and of 32 channels side by side, plain and
transposed products.
"""

import triton
import triton.language as tl


@triton.jit
def probe_mixed_widths_kernel(q, k, do, v, dq, dk, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    # Grid: D / BLOCK_D programs.
    # Owns: BLOCK_D channels of dq and dk.
    # Loops over: nothing.
    # Writes: dq = s k and dk = sᵀ q, where s = do vᵀ.
    o_t = tl.arange(0, BLOCK)[:, None]
    o_v = o_t * D + tl.arange(0, D)[None, :]
    o_d = o_t * D + tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    b_k = tl.load(k + o_d)
    # [T, D] @ [D, T] -> [T, T]
    b_s = tl.dot(tl.load(do + o_v), tl.trans(tl.load(v + o_v))).to(b_k.dtype)
    # [T, T] @ [T, BLOCK_D] -> [T, BLOCK_D]
    tl.store(dq + o_d, tl.dot(b_s, b_k))
    tl.store(dk + o_d, tl.dot(tl.trans(b_s), tl.load(q + o_d)))
