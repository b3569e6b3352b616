"""Planted bugs of block-sparse attention and of HSTU's layer of it."""

from tilewise.verify.suite import Mutant

_VARLEN, _BLOCKS = "_device.varlen", "_device.blocks"
_CHOOSE, _NORM, _KEYS, _SELECTED, _BSA = (
    "bsa.kernels_choose",
    "bsa.kernels_norm",
    "bsa.kernels_keys",
    "bsa.kernels_selected",
    "bsa.launch",
)
_VISIBLE = "right = -min(options.block_size - 1, q.shape[-3])"
_SCORE = "silu_weights(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), scale_log2, None)"
_CMP = "acc, _ = normalise(b_x * b_gate[:, :, None], m_x, H * DV, EPS)"
_NORM_BACK = "b_dy - token_sum(b_dy) / (H * DV) - b_y * (token_sum(b_dy * b_y) / (H * DV))"

BSA = (
    Mutant(
        "block-early",
        "a mean is seen one token before its block ends",
        _BSA,
        _VISIBLE,
        "right = -min(options.block_size - 2, q.shape[-3])",
    ),
    Mutant("block-begun", "a mean is seen as soon as its block begins", _BSA, _VISIBLE, "right = 0"),
    Mutant(
        "window-long",
        "the window reaches one key too far",
        _BSA,
        "left = options.window_size - 1",
        "left = options.window_size",
    ),
    Mutant(
        "interleave-ignored",
        "every head chooses for itself",
        _BSA,
        "shared = 2 if options.interleave else 1",
        "shared = 1",
    ),
    Mutant(
        "odd-head-chooses",
        "a pair takes the blocks of its second head",
        _CHOOSE,
        "i_h * HEADS, start_q, Tq",
        "i_h * HEADS + HEADS - 1, start_q, Tq",
    ),
    Mutant(
        "raw-scores",
        "blocks are ranked by their scores before SiLU",
        _CHOOSE,
        _SCORE,
        "tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)",
    ),
    Mutant(
        "negatives-backwards",
        "of negative scores the worst is the best",
        _CHOOSE,
        "bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)",
        "bits = bits",
    ),
    Mutant(
        "own-twice",
        "the own block may be chosen besides",
        _CHOOSE,
        "o_n[None, :] < own[:, None]",
        "o_n[None, :] <= own[:, None]",
    ),
    Mutant(
        "own-lost",
        "the own block is not forced",
        _CHOOSE,
        "(o_s == COUNT - 1)[None, :], own[:, None], block",
        "(o_s < 0)[None, :], own[:, None], block",
    ),
    Mutant(
        "best-again",
        "the best block takes every place",
        _CHOOSE,
        "keys = tl.where(keys == best[:, None], NONE, keys)",
        "keys = keys",
    ),
    Mutant(
        "one-fewer",
        "one block too few is chosen",
        _CHOOSE,
        "taken = (o_s < COUNT - 1)[None, :]",
        "taken = (o_s < COUNT - 2)[None, :]",
    ),
    Mutant(
        "means-of-the-first",
        "packed: the first sequence's means choose for all",
        _CHOOSE,
        "start_w, n_seen = sequence_bounds",
        "_, n_seen = sequence_bounds",
    ),
    Mutant(
        "wrong-count",
        "a mean divides by one too few",
        "nsa.kernels_compress",
        "acc / SIZE, D, BLOCK_N",
        "acc / (SIZE - 1), D, BLOCK_N",
    ),
    Mutant(
        "selected-base-2",
        "chosen blocks: the sigmoid is that of base 2",
        "bsa.selected",
        '"n_slots": named.tile_slots(named.block_size), "scale_log2": scale * LOG2E',
        '"n_slots": named.tile_slots(named.block_size), "scale_log2": scale',
    ),
    Mutant(
        "sees-next",
        "chosen blocks: a query sees the next key",
        _BLOCKS,
        "o_t - i_key + 1, n_kept",
        "o_t - i_key + 2, n_kept",
    ),
    Mutant(
        "heads-mixed",
        "chosen blocks: a pair's second head overwrites the first",
        _SELECTED,
        "store_plain(partial_o, ((o_c * n_heads + i_shared) * S + o_s) * HEADS + i_h % HEADS",
        "store_plain(partial_o, ((o_c * n_heads + i_shared) * S + o_s) * HEADS",
    ),
    Mutant(
        "slot-lost",
        "the first chosen block is left out of the sum",
        "nsa.kernels_selected_bwd",
        "for i_s in range(SLOTS)",
        "for i_s in range(1, SLOTS)",
    ),
    Mutant(
        "norm-of-a-head",
        "layer norm takes each head by itself",
        _NORM,
        "tl.sum(tl.sum(b_x, 2), 1)[:, None, None]",
        "tl.sum(b_x, 2)[:, :, None] * b_x.shape[1]",
    ),
    Mutant("norm-uncentred", "layer norm does not take off the mean", _NORM, "b_x - token_sum(b_x) / N", "b_x"),
    Mutant("eps-missing", "layer norm divides by zero where a branch sees nothing", _NORM, "/ N + EPS", "/ N"),
    Mutant(
        "gate-after-norm",
        "the compressed branch's gate comes after the norm",
        _NORM,
        _CMP,
        "acc = normalise(b_x, m_x, H * DV, EPS)[0] * b_gate[:, :, None]",
    ),
    Mutant(
        "wrong-gate",
        "the window takes the chosen blocks' gate",
        _NORM,
        "gated_branch(o_swa, g_swa",
        "gated_branch(o_swa, g_slc",
    ),
    Mutant("u-ignored", "the backward lacks u", _NORM, "b_dy = b_do * b_u", "b_dy = b_do"),
    Mutant("du-with-u", "u's gradient is multiplied by u", _NORM, "(b_do * acc).to(du", "(b_dy * acc).to(du"),
    Mutant(
        "norm-mean-gradient",
        "the mean passes no gradient",
        _NORM,
        _NORM_BACK,
        "b_dy - b_y * (token_sum(b_dy * b_y) / (H * DV))",
    ),
    Mutant(
        "norm-deviation-gradient",
        "the deviation passes no gradient",
        _NORM,
        _NORM_BACK,
        "b_dy - token_sum(b_dy) / (H * DV)",
    ),
    Mutant(
        "gate-gradient",
        "a gate's gradient does not come through the norm",
        _NORM,
        "tl.sum(b_dx * b_x, 2)",
        "tl.sum(b_dy * b_x, 2)",
    ),
    Mutant(
        "ungated-backward", "branches get the gradient without their gate", _NORM, "(b_dx * b_gate[:, :, None])", "b_dx"
    ),
    Mutant(
        "slope-without-scale",
        "chosen blocks: SiLU's derivative lacks the scale",
        _SELECTED,
        "scale_log2, None, scale)",
        "scale_log2, None, 1.0)",
    ),
    Mutant(
        "selected-unmasked",
        "chosen blocks: dQ and dK see later keys",
        _SELECTED,
        "b_ds = tl.where(m_keep, b_dp * b_slope, 0.0)",
        "b_ds = (b_dp * b_slope)",
    ),
    Mutant(
        "means-unscaled",
        "keys get their means' whole gradient",
        _KEYS,
        "mask=m_c, other=0.0).to(tl.float32) / BLOCK_SIZE",
        "mask=m_c, other=0.0).to(tl.float32)",
    ),
    Mutant(
        "means-lost",
        "keys get nothing of their means' gradient",
        _KEYS,
        "mask=m_c, other=0.0)",
        "mask=m_c & (o_d < 0)[None, :], other=0.0)",
    ),
    Mutant("window-lost", "keys get nothing of the window's gradient", _KEYS, "if dx_swa is not None:", "if False:"),
    Mutant(
        "compressed-dq-lost", "dQ lacks the compressed branch", "bsa.selected", "inputs, lists, base)", "inputs, lists)"
    ),
    Mutant("window-dq-lost", "dQ lacks the window", _BSA, "dq = dq.add_(dq_swa)", "dq = dq.contiguous()"),
)

_LAYER = "bsa.hstu_bsa"
_GATES = "g_cmp, g_slc, g_swa = (gate.flatten(0, 1).index_select(0, slots) for gate in gates)"
_PADDED = "padded_q, padded_k = padded(q), padded(k)"
_PLACE = "return sequence * length + position"
_QK = "q, k = (x.unflatten(-1, (num_heads, attention_dim)) for x in (q, k))"

HSTU_BSA = (
    Mutant("padding-of-ones", "padding holds ones", _LAYER, "torch.zeros(batch * length", "torch.ones(batch * length"),
    Mutant(
        "padded-to-longest",
        "the padded length is the longest sequence's",
        _LAYER,
        "x_offsets.shape[0] - 1, invalid_attn_mask.shape[-1]",
        "x_offsets.shape[0] - 1, int(x_offsets.diff().max())",
    ),
    Mutant("keys-are-queries", "padded_k holds queries", _LAYER, _PADDED, "padded_q, padded_k = padded(q), padded(q)"),
    Mutant(
        "padded-detached",
        "no gradient comes through padded_k",
        _LAYER,
        _PADDED,
        "padded_q, padded_k = padded(q), padded(k.detach())",
    ),
    Mutant(
        "gates-of-first-rows",
        "gates are those of the first padded rows",
        _LAYER,
        "gate.flatten(0, 1).index_select(0, slots)",
        "gate.flatten(0, 1)[: q.shape[0]]",
    ),
    Mutant(
        "gates-detached",
        "no gradient reaches the gate model",
        _LAYER,
        "gate.flatten(0, 1)",
        "gate.detach().flatten(0, 1)",
    ),
    Mutant(
        "gates-swapped",
        "the first two gates change places",
        _LAYER,
        "g_cmp, g_slc, g_swa = (",
        "g_slc, g_cmp, g_swa = (",
    ),
    Mutant(
        "gates-one-row-off",
        "gates are the neighbouring token's",
        _LAYER,
        _GATES,
        "g_cmp, g_slc, g_swa = (gate.roll(1, 1).flatten(0, 1).index_select(0, slots) for gate in gates)",
    ),
    Mutant(
        "heads-interleaved",
        "channels of all heads come in turn",
        _LAYER,
        _QK,
        "q, k = (x.unflatten(-1, (attention_dim, num_heads)).transpose(-1, -2).contiguous() for x in (q, k))",
    ),
    Mutant(
        "channels-first",
        "the output's channels come before its heads",
        _LAYER,
        "o.flatten(1)",
        "o.transpose(1, 2).flatten(1)",
    ),
    Mutant("never-paired", "heads never share blocks", _LAYER, "interleave=num_heads % 2 == 0", "interleave=False"),
    Mutant("window-ignored", "the window is ignored", _LAYER, "window_size, interleave=", "0, interleave="),
    Mutant(
        "first-token-before",
        "a sequence's first token counts to the one before",
        _LAYER,
        "token, right=True",
        "token, right=False",
    ),
    Mutant(
        "rows-without-padding",
        "tokens lie in the padded rows end to end",
        _LAYER,
        _PLACE,
        "return 0 * sequence + token",
    ),
    Mutant(
        "aligned-at-the-end",
        "sequences stand at the end of their padding",
        _LAYER,
        _PLACE,
        "return sequence * length + length - (offsets[sequence + 1] - offsets[sequence]) + position",
    ),
    Mutant(
        "position-off",
        "tokens stand one row too early",
        _LAYER,
        "(token - offsets[sequence])",
        "(token - offsets[sequence] - 1)",
    ),
    Mutant(
        "blocks-of-the-batch",
        "blocks are counted from the batch's start",
        _CHOOSE,
        "own = o_m // BLOCK_SIZE",
        "own = (start_q + o_m) // BLOCK_SIZE",
    ),
    Mutant(
        "means-of-the-first",
        "the first sequence's means choose for all",
        _CHOOSE,
        "start_w, n_seen = sequence_bounds",
        "_, n_seen = sequence_bounds",
    ),
    Mutant(
        "windows-elsewhere",
        "means are read where the queries lie",
        _VARLEN,
        "start, n_others = sequence_bounds(p_cu_other",
        "_, n_others = sequence_bounds(p_cu_other",
    ),
    Mutant(
        "means-from-token-0",
        "every sequence's means are the first one's",
        "nsa.kernels_compress",
        "(start + o_c * STRIDE)",
        "(o_c * STRIDE)",
    ),
    Mutant(
        "gradient-of-the-first",
        "keys get the first sequence's means' gradient",
        _KEYS,
        "start_w, n_mine = sequence_bounds",
        "_, n_mine = sequence_bounds",
    ),
    Mutant(
        "lists-overlap",
        "blocks of neighbouring sequences share a list",
        _VARLEN,
        "slot = load_offset(p_cu, i_b, n_tokens) // BLOCK + i_b",
        "slot = load_offset(p_cu, i_b, n_tokens) // BLOCK",
    ),
    Mutant(
        "packed-start",
        "every sequence starts at token 0",
        _VARLEN,
        "start = tl.load(p_tile + 2)",
        "start = 0 * tl.load(p_tile + 2)",
    ),
)
