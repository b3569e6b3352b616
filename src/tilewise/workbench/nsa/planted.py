"""Bugs planted in native sparse attention's kernels, part by part."""

from tilewise.verify.suite import Mutant

_FWD, _BWD, _INDEX, _BLOCKS = (
    "nsa.kernels_selected_fwd",
    "nsa.kernels_selected_bwd",
    "nsa.kernels_index",
    "_device.blocks",
)
_CHOOSE, _COMPRESS, _COMBINE = "nsa.kernels_choose", "nsa.kernels_compress", "nsa.kernels_combine"
_KEPT = "kept = tl.minimum(o_t + 1, n_keys) - i_key"
_PAIRS = "b_ds = b_p * (b_dp - b_delta[:, None])"

SELECTED = (
    Mutant(
        "union-sees-next",
        "query order: a query sees the next key",
        _FWD,
        _KEPT,
        "kept = tl.minimum(o_t + 2, n_keys) - i_key",
    ),
    Mutant(
        "union-not-itself",
        "query order: a query does not see itself",
        _FWD,
        _KEPT,
        "kept = tl.minimum(o_t, n_keys) - i_key",
    ),
    Mutant(
        "union-for-all",
        "query order: every token of a tile attends to every block of the union",
        _FWD,
        'b_p = tl.exp2(b_s * scale_log2 - tl.where(named, shift, float("inf"))[:, None])',
        "b_p = tl.exp2(b_s * scale_log2 - shift[:, None])",
    ),
    Mutant("forgotten-rescale", "earlier sums keep the old maximum", _FWD, "acc * rescale[:, None]", "acc"),
    Mutant(
        "sum-not-rescaled",
        "the running sum keeps the old maximum",
        _FWD,
        "l = l * rescale + tl.sum(b_p, 1)",
        "l = l + tl.sum(b_p, 1)",
    ),
    Mutant(
        "last-block-lost",
        "the last block of a union is not read",
        _FWD,
        "ends = (0, n_masked, n_union)",
        "ends = (0, n_masked, n_union - 1)",
    ),
    Mutant(
        "empty-row-shift",
        "-inf minus -inf",
        _FWD,
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "shift = m_new",
    ),
    Mutant(
        "missing-scale", "scores are not scaled", "nsa.selected", "(abs(scale) or 1.0) * flash.LOG2E", "flash.LOG2E"
    ),
    Mutant(
        "sign-ignored",
        "a negative scale acts as a positive one",
        "nsa.selected",
        "1 if scale > 0 else -1 if scale < 0 else 0",
        "1",
    ),
    Mutant(
        "lists-see-next",
        "key order: a query sees the next key",
        _BLOCKS,
        "o_t - i_key + 1, n_kept",
        "o_t - i_key + 2, n_kept",
    ),
    Mutant(
        "merge-unnormalised",
        "key order: parts are weighted as if each were all",
        _FWD,
        "tl.exp2(b_one - total)",
        "tl.exp2(b_one - m)",
    ),
    Mutant(
        "merge-slot-lost",
        "key order: the first block is left out of the sum",
        _FWD,
        "for i_s in range(SLOTS)",
        "for i_s in range(1, SLOTS)",
    ),
    Mutant(
        "twice-counts-twice",
        "a block that is named twice counts twice",
        _BLOCKS,
        "(leads | (before % ENTRIES // SLOTS_P != entry // SLOTS_P))",
        "(leads | (before >= 0))",
    ),
    Mutant(
        "bits-of-slots",
        "a union's bits are slots, not tokens",
        _INDEX,
        "1 << (b_entry // SLOTS_P)",
        "1 << (b_entry % SLOTS_P)",
    ),
    Mutant(
        "own-unmasked",
        "the own block counts as whole",
        _INDEX,
        "b_block >= (i_t + 1) // BLOCK_SIZE",
        "b_block > (i_t + 1) // BLOCK_SIZE",
    ),
    Mutant(
        "list-entry-lost",
        "each tile's last entry of a block is lost",
        _INDEX,
        "b_rank + counted.to(tl.int32), mask=ends",
        "b_rank, mask=ends",
    ),
    Mutant(
        "packed-start",
        "every sequence starts where the first does",
        "_device.varlen",
        "start, n_tokens = sequence_bounds(p_cu, i_b, n_tokens)",
        "start, n_tokens = sequence_bounds(p_cu, i_b, n_tokens); start = start * 0",
    ),
    Mutant("delta-dropped", "softmax's second gradient term is dropped", _BWD, _PAIRS, "b_ds = b_p * b_dp"),
    Mutant(
        "lse-gradient",
        "the LSE's incoming gradient is ignored",
        "_device.delta",
        "b_delta -= tl.load",
        "b_delta -= 0.0 * tl.load",
    ),
    Mutant("dq-unscaled", "dQ lacks the scale", _BWD, "acc_dq * scale", "acc_dq"),
    Mutant(
        "dk-unscaled",
        "dK lacks the scale",
        "nsa.selected",
        "_finish(acc_dk, k, inputs.scale)",
        "_finish(acc_dk, k, 1.0)",
    ),
    Mutant(
        "dv-from-scores",
        "dV is summed with the scores' gradient",
        _BWD,
        "tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, acc_dv",
        "tl.dot(tl.trans(b_ds.to(b_do.dtype)), b_do, acc_dv",
    ),
    Mutant(
        "lists-unmasked",
        "dK and dV see later keys",
        _BWD,
        "b_p = tl.where(tl.arange(0, BLOCK_N)[None, :] < kept[:, None], b_p, 0.0)",
        "b_p = b_p",
    ),
    Mutant(
        "union-unmasked",
        "dQ sees later keys",
        _BWD,
        "b_p = tl.where(o_n[None, :] < kept[:, None], b_p, 0.0)",
        "b_p = b_p",
    ),
    Mutant(
        "head-lost",
        "dK and dV lack one head of each group",
        _BLOCKS,
        "m_r = i_e < n_entries",
        "m_r = (i_e < n_entries) & (o_g > 0)",
    ),
)

ATTEND = (
    Mutant(
        "selected-causal",
        "selected blocks are cut at the query",
        _BLOCKS,
        "kept = tl.where(o_s >= S, causal, n_kept)",
        "kept = causal",
    ),
    Mutant(
        "own-whole",
        "the own block is seen whole",
        _BLOCKS,
        "kept = tl.where(o_s >= S, causal, n_kept)",
        "kept = tl.zeros_like(o_t) + n_kept",
    ),
    Mutant(
        "own-lost", "the own block is left out", _BLOCKS, "(o_s >= S) & (o_s < S + OWN)", "(o_s > S) & (o_s < S + OWN)"
    ),
    Mutant("twice-counts-once", "a block that is named twice counts once", "nsa.selected", "once=causal", "once=True"),
    Mutant(
        "mask-ignored",
        "masked blocks take part",
        "nsa.attend",
        "indices.where(named, -1)",
        "indices.where(indices >= -1, -1)",
    ),
    Mutant(
        "scale-ignored",
        "sel_scale is ignored",
        _FWD,
        "mask=m_r & (o_s < S), other=1.0)[:, None]",
        "mask=m_r & (o_s < 0), other=1.0)[:, None]",
    ),
    Mutant(
        "own-scaled",
        "the own block's scores are halved",
        _FWD,
        "mask=m_r & (o_s < S), other=1.0",
        "mask=m_r & (o_s < S), other=0.5",
    ),
    Mutant(
        "straight-through",
        "sel_scale's gradient does not see the scores",
        _BWD,
        "tl.sum(b_ds * b_plain, 1)",
        "tl.sum(b_ds, 1)",
    ),
    Mutant("dsel-unscaled", "sel_scale's gradient lacks the scale", _BWD, "b_dsel * scale", "b_dsel"),
    Mutant(
        "dsel-one-head",
        "sel_scale's gradient is one head's",
        _BWD,
        "b_sum = tl.sum(tl.reshape(",
        "b_sum = tl.max(tl.reshape(",
    ),
    Mutant("dk-without-sel", "dK and dQ lack sel_scale", _BWD, "b_ds = b_ds * b_sel[:, None]", "b_ds = b_ds"),
    Mutant(
        "tail-unmasked",
        "keys past the end take part",
        _BLOCKS,
        "n_kept = tl.minimum(n_keys - i_key, BLOCK_SIZE)",
        "n_kept = n_keys * 0 + BLOCK_SIZE",
    ),
    Mutant("lse-in-log2", "the LSE is a logarithm to base 2", _FWD, "total * 0.6931471805599453", "total"),
    Mutant("delta-dropped", "softmax's second gradient term is dropped", _BWD, _PAIRS, "b_ds = b_p * b_dp"),
    Mutant(
        "lse-gradient",
        "the LSE's incoming gradient is ignored",
        "_device.delta",
        "b_delta -= tl.load",
        "b_delta -= 0.0 * tl.load",
    ),
    Mutant(
        "dq-unscaled",
        "dQ lacks the scale",
        _BWD,
        "tl.dot(b_ds, b_k, input_precision=PRECISION) * scale",
        "tl.dot(b_ds, b_k, input_precision=PRECISION)",
    ),
    Mutant("dq-slot-lost", "dQ lacks the first slot", _BWD, "for i_s in range(SLOTS)", "for i_s in range(1, SLOTS)"),
    Mutant(
        "window-short",
        "the sliding window lacks its oldest key",
        "nsa.attend",
        "True, block_size, 0, scale",
        "True, block_size - 1, 0, scale",
    ),
    Mutant(
        "wrong-kv-head",
        "index heads take KV heads round robin",
        _FWD,
        "i_h // heads_a_key",
        "i_h % (n_heads // heads_a_key)",
    ),
)

_VISIBLE = "right = -min(size - 1, q.shape[-3])"

COMPRESSED = (
    Mutant(
        "window-early",
        "a window is seen one token early",
        "nsa.compressed",
        _VISIBLE,
        "right = -min(size - 2, q.shape[-3])",
    ),
    Mutant(
        "window-late", "a window is seen one token late", "nsa.compressed", _VISIBLE, "right = -min(size, q.shape[-3])"
    ),
    Mutant("window-begun", "a window is seen as soon as it begins", "nsa.compressed", _VISIBLE, "right = 0"),
    Mutant(
        "stride-ignored",
        "windows lie side by side in the mask",
        "_device.mask",
        "o_n = o_n * KEY_STRIDE",
        "o_n = o_n",
    ),
    Mutant(
        "aligned-at-the-end",
        "windows are counted from the last query",
        "_device.mask",
        "if KEY_STRIDE is not None: off = 0",
        "off = off",
    ),
    Mutant(
        "too-few-tiles",
        "half of the key tiles are not read",
        "_device.mask",
        "(position + (KEY_STRIDE - 1)) // KEY_STRIDE",
        "position // (2 * KEY_STRIDE)",
    ),
    Mutant(
        "forgotten-rescale",
        "earlier sums keep the old maximum",
        "flash.kernels.fwd",
        "acc = acc * rescale[:, None]",
        "acc = acc",
    ),
    Mutant(
        "missing-scale",
        "scores are not scaled",
        "flash.kernels.fwd",
        "m, l, scale_log2, MASKED",
        "m, l, 1.4426950408889634, MASKED",
    ),
    Mutant(
        "wrong-kv-head",
        "query heads take KV heads round robin",
        "flash.kernels.fwd",
        "i_h // group",
        "i_h % (n_heads // group)",
    ),
    Mutant(
        "empty-row-shift",
        "-inf minus -inf",
        "_device.softmax",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "shift = m_new",
    ),
    Mutant(
        "lse-in-log2",
        "the LSE is a logarithm to base 2",
        "_device.softmax",
        "(m + tl.log2(l)) * 0.6931471805599453",
        "m + tl.log2(l)",
    ),
    Mutant(
        "delta-dropped",
        "softmax's second gradient term is dropped",
        "_device.softmax",
        "b_ds = b_p * (b_dp - b_delta)",
        "b_ds = b_p * b_dp",
    ),
    Mutant(
        "lse-gradient",
        "the LSE's incoming gradient is ignored",
        "_device.delta",
        "b_delta -= tl.load",
        "b_delta -= 0.0 * tl.load",
    ),
    Mutant("dq-unscaled", "dQ lacks the scale", "flash.kernels.bwd", "acc_dq * scale", "acc_dq"),
    Mutant("dk-unscaled", "dK lacks the scale", "flash.kernels.bwd", "acc_dk * scale", "acc_dk"),
    Mutant(
        "backward-unmasked",
        "dK and dV see windows that have not ended",
        "flash.kernels.bwd",
        "KEY_STRIDE), b_pT, 0.0)",
        "KEY_STRIDE), b_pT, b_pT)",
    ),
    Mutant(
        "packed-start",
        "every sequence starts at token 0",
        "_device.varlen",
        "start, n_rows = sequence_bounds",
        "_, n_rows = sequence_bounds",
    ),
)

WHOLE = (
    Mutant(
        "mean-of-stride",
        "a mean divides by the stride",
        _COMPRESS,
        "acc / SIZE, D, BLOCK_N",
        "acc / STRIDE, D, BLOCK_N",
    ),
    Mutant("windows-apart", "windows do not overlap", _COMPRESS, "start + o_c * STRIDE", "start + o_c * SIZE"),
    Mutant(
        "overlap-lost",
        "a token's gradient comes from one window",
        _COMPRESS,
        "for i in range(SIZE // STRIDE)",
        "for i in range(1)",
    ),
    Mutant(
        "means-unscaled", "the means' gradient is not divided", _COMPRESS, "acc / SIZE, D, BLOCK_M", "acc, D, BLOCK_M"
    ),
    Mutant(
        "one-head-chooses",
        "one head of the group chooses for all",
        _CHOOSE,
        "i_hk * group + group)",
        "i_hk * group + 1)",
    ),
    Mutant(
        "choice-sees-future",
        "windows count before they have ended",
        _CHOOSE,
        "(o_c * STRIDE + (SIZE - 1))[None, :]",
        "(o_c * STRIDE)[None, :]",
    ),
    Mutant(
        "overlap-ignored",
        "a window counts for the block it begins in alone",
        _CHOOSE,
        "for PLANE in tl.static_range(PLANES): p_score",
        "for PLANE in tl.static_range(1):\n        p_score",
    ),
    Mutant(
        "no-softmax", "scores are not normalised by the LSE", _CHOOSE, "* scale_log2 - b_lse[:, None])", "* scale_log2)"
    ),
    Mutant(
        "local-lost", "one block fewer is forced before the query", _CHOOSE, "(i_own - LOCAL)", "(i_own - LOCAL + 1)"
    ),
    Mutant("first-lost", "one block fewer is forced at the start", _CHOOSE, "(o_j < INIT)", "(o_j < INIT - 1)"),
    Mutant(
        "future-block",
        "the block after the own one may be chosen",
        _CHOOSE,
        "o_j[None, :] <= i_own[:, None]",
        "o_j[None, :] <= i_own[:, None] + 1",
    ),
    Mutant("one-more", "one block too many is taken", _CHOOSE, "n_equal = COUNT - ", "n_equal = COUNT + 1 - "),
    Mutant(
        "worst-first",
        "the limit is not raised to the best scores",
        _CHOOSE,
        "last = tl.where(count >= COUNT, higher, last)",
        "last = last",
    ),
    Mutant(
        "zero-padding",
        "0 stands where there is no further block",
        _CHOOSE,
        "tl.full([BLOCK_R, COUNT_P], -1, tl.int32)",
        "tl.full([BLOCK_R, COUNT_P], 0, tl.int32)",
    ),
    Mutant("wrong-gate", "the window takes the selected branch's gate", _COMBINE, "gated(x2, gate2", "gated(x2, gate1"),
    Mutant(
        "gate-gradient",
        "a gate's gradient is multiplied by the gate",
        _COMBINE,
        "tl.sum(b_dy * b_x, 1)",
        "b_gate * tl.sum(b_dy * b_x, 1)",
    ),
    Mutant(
        "ungated-backward",
        "branches get the whole gradient",
        _COMBINE,
        "(b_dy * b_gate[:, None])",
        "(b_dy + 0.0 * b_gate[:, None])",
    ),
    Mutant(
        "window-long",
        "the window reaches one key too far",
        "nsa.branches",
        "True, window_size - 1, 0",
        "True, window_size, 0",
    ),
)
