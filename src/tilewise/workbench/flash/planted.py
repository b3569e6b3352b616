"""Bugs planted in flash attention's kernels: in the portable ones, and in those for Hopper, which run only on such a
GPU.
"""

from functools import partial

from tilewise.verify.suite import Mutant
from tilewise.workbench.flash.planted_sinks import HOPPER_SINKS, SINKS
from tilewise.workbench.flash.planted_wide import HOPPER_WIDE

_WORK, _BLOCKS, _GRADIENTS, _FWD, _BWD, _SUM, _REACH = (
    "_device.hopper.work",
    "_device.hopper.blocks",
    "_device.hopper.gradients",
    "flash.hopper.fwd",
    "flash.hopper.bwd",
    "flash.hopper.sum",
    "_device.hopper.semaphore",
)
_planted = partial(Mutant, capability=(9, 0))

_KEEP_RIGHT = "o_n <= o_m + (off + right)"
_KEEP_LEFT = "o_n >= o_m + (off - left)"
_STORE_DK = "store_rows(dk_rows, i_n, acc_dk * scales.scale, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D)"
_STORE_DV = "store_rows(dv_rows, i_n, acc_dv, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV)"
_SWAP_DK, _SWAP_DV = _STORE_DV.replace("dv_rows", "dk_rows"), _STORE_DK.replace("dk_rows", "dv_rows")

PORTABLE = (
    Mutant(
        "forgotten-rescale",
        "earlier sums keep the old maximum",
        "flash.kernels.fwd",
        "acc_scaled = acc * rescale[:, None]",
        "acc_scaled = acc",
    ),
    Mutant(
        "sum-not-rescaled",
        "the running sum keeps the old maximum",
        "_device.scores",
        "l_new = l * rescale +",
        "l_new = l +",
    ),
    Mutant("causal-short", "a query does not see itself", "_device.scores", _KEEP_RIGHT, "o_n < o_m + (off + right)"),
    Mutant("causal-long", "a query sees the next key", "_device.scores", _KEEP_RIGHT, "o_n <= o_m + (off + right + 1)"),
    Mutant(
        "causal-top-left", "the mask is aligned at the top left", "_device.scores", _KEEP_RIGHT, "o_n <= o_m + right"
    ),
    Mutant("window-short", "the window's oldest key is lost", "_device.scores", _KEEP_LEFT, "o_n > o_m + (off - left)"),
    Mutant(
        "window-long",
        "the window reaches one key too far",
        "_device.scores",
        _KEEP_LEFT,
        "o_n >= o_m + (off - left - 1)",
    ),
    Mutant(
        "tail-unmasked", "keys past the end take part", "_device.scores", "m_keep = o_n < n_keys", "m_keep = o_n >= 0"
    ),
    Mutant(
        "tail-skipped",
        "the last, partial key tile is not read",
        "_device.scores",
        "high = n_keys full_high",
        "high = n_keys // BLOCK_N * BLOCK_N\n    full_high",
    ),
    Mutant(
        "diagonal-unmasked",
        "tiles on the diagonal count as whole",
        "_device.scores",
        "full_high = tl.minimum(n_keys, keys_before(i_m + 1",
        "full_high = tl.minimum(n_keys, keys_before(i_m + BLOCK_M",
    ),
    Mutant(
        "wrong-kv-head",
        "query heads take KV heads round robin",
        "flash.kernels.fwd",
        "i_h // group",
        "i_h % (n_heads // group)",
    ),
    Mutant(
        "wrong-kv-head-dq", "the same, in dQ alone", "flash.kernels.bwd", "i_h // group", "i_h % (n_heads // group)"
    ),
    Mutant(
        "missing-scale",
        "scores are not scaled",
        "flash.kernels.fwd",
        "m, l, scales.scale_log2, MASKED",
        "m, l, 1.4426950408889634, MASKED",
    ),
    Mutant(
        "sign-ignored",
        "a negative scale acts as a positive one",
        "flash.kernels.fwd",
        "b_q = (b_q * SIGN).to(b_q.dtype)",
        "b_q = b_q",
    ),
    Mutant(
        "lse-in-log2",
        "the LSE is a logarithm to base 2",
        "_device.scores",
        "(m + tl.log2(l)) * 0.6931471805599453",
        "m + tl.log2(l)",
    ),
    Mutant(
        "softcap-ignored",
        "scores are not capped",
        "_device.scores",
        "b_s = tanh(b_s * score_scale)",
        "b_s = b_s * score_scale",
    ),
    Mutant(
        "softcap-gradient",
        "the cap's derivative is dropped",
        "_device.scores",
        "b_ds = b_ds * (1.0 - b_s * b_s)",
        "b_ds = b_ds",
    ),
    Mutant(
        "empty-row-nan",
        "a row that sees nothing divides 0 by 0",
        "_device.scores",
        "seen = l != 0.0",
        "seen = l >= 0.0",
    ),
    Mutant(
        "empty-row-shift",
        "-inf minus -inf",
        "_device.scores",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "shift = m_new",
    ),
    Mutant(
        "low-precision-sum",
        "the output is summed in the inputs' precision",
        "flash.kernels.fwd",
        "return acc, m, l",
        "return acc.to(b_v.dtype).to(tl.float32), m, l",
    ),
    Mutant(
        "dk-dv-swapped",
        "dk holds dv and dv holds dk",
        "flash.kernels.bwd",
        f"{_STORE_DK} {_STORE_DV}",
        f"{_SWAP_DV}; {_SWAP_DK}",
    ),
    Mutant(
        "delta-dropped",
        "softmax's second gradient term is dropped",
        "_device.scores",
        "b_ds = b_p * (b_dp - b_delta)",
        "b_ds = b_p * b_dp",
    ),
    Mutant(
        "lse-gradient",
        "the LSE's incoming gradient is ignored",
        "_device.scores",
        "b_delta -= tl.load",
        "b_delta -= 0.0 * tl.load",
    ),
    Mutant("dq-unscaled", "dQ lacks the scale", "flash.kernels.bwd", "acc_dq * scales.scale", "acc_dq"),
    Mutant("dk-unscaled", "dK lacks the scale", "flash.kernels.bwd", "acc_dk * scales.scale", "acc_dk"),
    Mutant(
        "group-sum-lost",
        "dK and dV of one query head of the group alone",
        "flash.kernels.bwd",
        "i_hk * heads.group + heads.group)",
        "i_hk * heads.group + 1)",
    ),
    Mutant(
        "backward-unmasked",
        "dK and dV see masked pairs",
        "flash.kernels.bwd",
        "KEY_STRIDE), b_pT, 0.0)",
        "KEY_STRIDE), b_pT, b_pT)",
    ),
    Mutant(
        "packed-start",
        "every sequence starts at token 0",
        "_device.rows",
        "start, n_rows = sequence_bounds",
        "_, n_rows = sequence_bounds",
    ),
    Mutant(
        "store-past-end",
        "one row past the last is written",
        "_device.rows",
        "< rows.n_rows)[:, None] m_d = (tl.arange(0, BLOCK_D) < D)[None, :] tl.store",
        "<= rows.n_rows)[:, None]; m_d = (tl.arange(0, BLOCK_D) < D)[None, :]\n    tl.store",
    ),
    *SINKS,
)

HOPPER = (
    _planted(
        "hopper-forgotten-rescale",
        "earlier sums keep the old maximum",
        _FWD,
        "acc = scale_rows(acc, rescale)",
        "acc = acc",
    ),
    _planted(
        "hopper-wrong-kv-head",
        "all query heads take the first KV head",
        _WORK,
        "item.i_h // sizes.group",
        "item.i_h * 0",
    ),
    _planted(
        "hopper-sign-ignored", "a negative scale acts as a positive one", _FWD, "b_s = b_s * TILE.SIGN", "b_s = b_s"
    ),
    _planted(
        "hopper-other-values",
        "a tile's probabilities meet the values of the next keys",
        _WORK,
        "row + TILE.BLOCK_N, TILE.BLOCK_DV",
        "row + TILE.BLOCK_N + 8, TILE.BLOCK_DV",
    ),
    _planted(
        "hopper-last-unmasked",
        "keys past the last count",
        _FWD,
        "given, TILE.MASK_LAST, TILE",
        "given, False, TILE",
    ),
    _planted(
        "hopper-sum-of-a-thread",
        "a row's sum is that of one thread of four",
        _FWD,
        "gl.sum(state.l, 1)",
        "gl.max(state.l, 1)",
    ),
    _planted(
        "hopper-diagonal-unmasked",
        "of the tiles that the right limit cuts, the last alone is masked",
        _FWD,
        "masked = gl.maximum(end - tiles.whole_end, 1)",
        "masked = gl.to_tensor(1)",
    ),
    _planted(
        "hopper-window-unmasked",
        "tiles that the left limit cuts count as whole",
        _FWD,
        "whole = gl.maximum(end - tiles.whole_first, masked)",
        "whole = gl.maximum(end - tiles.first, masked)",
    ),
    _planted(
        "hopper-lse-in-log2",
        "the LSE is a logarithm to base 2",
        _FWD,
        "(m + gl.log2(l)) * 0.6931471805599453",
        "m + gl.log2(l)",
    ),
    _planted(
        "hopper-empty-row-nan", "a row that sees nothing divides 0 by 0", _FWD, "seen = l != 0.0", "seen = l >= 0.0"
    ),
    _planted(
        "hopper-packed-start",
        "every sequence's keys start at token 0",
        _WORK,
        "start_k, n_keys = sequence_bounds",
        "_, n_keys = sequence_bounds",
    ),
    _planted(
        "hopper-rows-of-first",
        "all warpgroups mask as the first",
        _FWD,
        "o_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))",
        "o_m = item.row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))",
    ),
    _planted(
        "hopper-backward-unmasked",
        "gradients see masked pairs",
        _GRADIENTS,
        "return gl.where(m_keep, b_pT, 0.0)",
        "return b_pT",
    ),
    _planted(
        "hopper-causal-long",
        "the backward sees the next key",
        _GRADIENTS,
        "o_n <= o_q + limits.right",
        "o_n <= o_q + limits.right + 1",
    ),
    _planted(
        "hopper-window-short",
        "the window's oldest key has no gradient",
        _GRADIENTS,
        "o_n >= o_q - limits.left",
        "o_n > o_q - limits.left",
    ),
    _planted(
        "hopper-delta-dropped",
        "softmax's second gradient term is dropped",
        _GRADIENTS,
        "(b_dpT - gl.expand_dims(b_delta, 0))",
        "b_dpT",
    ),
    _planted(
        "hopper-softcap-gradient",
        "the cap's derivative is dropped",
        _GRADIENTS,
        "b_pT = b_pT * (1.0 - b_sT * b_sT)",
        "b_pT = b_pT",
    ),
    _planted("hopper-dk-unscaled", "dK lacks the scale", _BWD, "(acc_dk * given.scales.scale)", "acc_dk"),
    _planted(
        "hopper-half-of-keys",
        "dQ has one warpgroup's keys twice",
        _GRADIENTS,
        "ds.index(turn * 2 + 1).permute",
        "ds.index(turn * 2).permute",
    ),
    _planted(
        "hopper-columns-swapped",
        "dQ's halves of columns are swapped",
        _BWD,
        ".slice(W * HALF_D,",
        ".slice((1 - W) * HALF_D,",
    ),
    _planted(
        "hopper-sum-of-nothing",
        "the first block adds to an accumulator that was not zeroed",
        _GRADIENTS,
        "if meets_first(step.i_visit, target.first_from, target.i_block, given.limits):",
        "if target.i_block < 0:",
    ),
    _planted(
        "hopper-last-block-alone",
        "every block of keys overwrites dQ's accumulator",
        _GRADIENTS,
        "if meets_first(step.i_visit, target.first_from, target.i_block, given.limits):",
        "if target.i_block >= 0:",
    ),
    _planted(
        "hopper-first-too-early",
        "under a left limit, blocks of keys overwrite accumulators of dQ that others have added to",
        _REACH,
        "first = tl.where(i_n == 0, 0, tl.cdiv(tl.maximum(i_n + limits.left - off, 0), BLOCK_M))",
        "first = 0",
    ),
    _planted(
        "hopper-group-sum-lost",
        "dK and dV of a group's first head, as often as there are heads",
        _BLOCKS,
        "HeadRows(block.i_b, i_head + i_g,",
        "HeadRows(block.i_b, block.i_h * sizes.group,",
    ),
    _planted(
        "hopper-sweep-into-first",
        "without a causal mask, dQ of all heads of a group is added up as the first's",
        _BWD,
        "visits.first_acc + i_sweep * given.n_slots_q",
        "visits.first_acc",
    ),
    _planted(
        "hopper-diagonal-whole",
        "in the backward, tiles on the diagonal count as whole",
        _REACH,
        "low = tl.cdiv(tl.maximum(i_n + (BLOCK_N - 1) - off - limits.right, 0), BLOCK_M)",
        "low = 0",
    ),
    _planted(
        "hopper-window-whole",
        "in the backward, tiles that the left limit cuts count as whole",
        _REACH,
        "high = tl.maximum(i_n + 1 - off + limits.left, 0) // BLOCK_M",
        "high = tl.cdiv(n_queries, BLOCK_M)",
    ),
    _planted(
        "hopper-half-stored",
        "dK of a block's first keys is stored for all of them",
        _BLOCKS,
        "store_tile(given.dk, given.tiles.k, i_tile,",
        "store_tile(given.dk, given.tiles.k, slot.stage * TILES,",
    ),
    _planted(
        "hopper-packed-gradients",
        "in the backward, every sequence's keys start at token 0",
        _BLOCKS,
        "start_k, n_keys = sequence_bounds",
        "_, n_keys = sequence_bounds",
    ),
    _planted("hopper-dq-unscaled", "dQ lacks the scale", _SUM, "b_dq * scale", "b_dq"),
    *HOPPER_SINKS,
    *HOPPER_WIDE,
)
