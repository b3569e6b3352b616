"""Bugs planted in flash attention's kernels for Hopper, which run on such a GPU alone."""

from functools import partial

from tilewise.verify.suite import Mutant

_WORK, _BLOCKS, _GRADIENTS, _FWD, _BWD, _SUM, _REACH = (
    "_device.hopper.work",
    "_device.hopper.blocks",
    "_device.hopper.gradients",
    "flash.hopper.fwd",
    "flash.hopper.bwd",
    "flash.hopper.sum",
    "_device.reach",
)
_planted = partial(Mutant, capability=(9, 0))

HOPPER = (
    _planted(
        "hopper-forgotten-rescale",
        "earlier sums keep the old maximum",
        _FWD,
        "acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)",
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
        "row + TILE.BLOCK_N, TILE.PACKED)",
        "row + TILE.BLOCK_N + 8, TILE.PACKED)",
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
        "store_tile(given.dk, given.tiles.k.index(slot.stage * 2 + W)",
        "store_tile(given.dk, given.tiles.k.index(slot.stage * 2)",
    ),
    _planted(
        "hopper-packed-gradients",
        "in the backward, every sequence's keys start at token 0",
        _BLOCKS,
        "start_k, n_keys = sequence_bounds",
        "_, n_keys = sequence_bounds",
    ),
    _planted("hopper-dq-unscaled", "dQ lacks the scale", _SUM, "b_dq * scale", "b_dq"),
)
