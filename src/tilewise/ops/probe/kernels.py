"""The smallest kernel that shows the miscompile of Triton 3.4 to 3.7 on Hopper: a product of a transposed product, in a loop."""

import triton
import triton.language as tl


@triton.jit
def probe_transposed_product_kernel(q, k, x, out, n_tiles, BLOCK: tl.constexpr, D: tl.constexpr):
    # Grid: one program.
    # Owns: the whole result, [BLOCK, D].
    # Loops over: tiles of BLOCK queries.
    # Writes: out = sum over tiles of (q kᵀ)ᵀ x.
    o_r = tl.arange(0, BLOCK)
    o_d = tl.arange(0, D)
    o_tile = o_r[:, None] * D + o_d[None, :]
    b_k = tl.load(k + o_tile)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for i_tile in range(n_tiles):
        b_q = tl.load(q + i_tile * BLOCK * D + o_tile)
        b_x = tl.load(x + i_tile * BLOCK * D + o_tile)
        # [M, D] @ [D, N] -> [M, N]
        b_s = tl.dot(b_q, tl.trans(b_k))
        # [N, M] @ [M, D] -> [N, D]
        acc = tl.dot(tl.trans(b_s.to(b_x.dtype)), b_x, acc)
    tl.store(out + o_tile, acc)
