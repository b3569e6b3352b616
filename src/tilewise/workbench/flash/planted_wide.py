"""Bugs planted in flash attention's kernels for Hopper of more than 128 channels: in tiles of several pieces, and in
the backward whose warpgroups share the keys.
"""

from functools import partial

from tilewise.verify.suite import Mutant

_planted = partial(Mutant, capability=(9, 0))
_RING, _PIECES, _WIDE, _SUM = (
    "_device.hopper.ring",
    "_device.hopper.pieces",
    "_device.hopper.wide",
    "flash.hopper.sum",
)

HOPPER_WIDE = (
    _planted(
        "hopper-same-channels",
        "every piece of a tile is read from channel 0 on",
        _RING,
        "rows.i_h, row, i * WIDTH], barrier",
        "rows.i_h, row, 0], barrier",
    ),
    _planted(
        "hopper-same-channels-packed",
        "the same, of packed tensors alone",
        _RING,
        "o_row, i * WIDTH], barrier",
        "o_row, 0], barrier",
    ),
    _planted(
        "hopper-pieces-apart",
        "all pieces of Q meet the first one of K",
        _PIECES,
        "piece(tiles, i_tile * PIECES + i)\n        # [L, D] @ [D, R] -> [L, R]",
        "piece(tiles, i_tile * PIECES)\n",
    ),
    _planted(
        "hopper-last-piece",
        "scores are those of the last piece of channels",
        _PIECES,
        "use_acc=i > 0",
        "use_acc=False",
    ),
    _planted(
        "hopper-one-piece",
        "every piece of an output is the first one",
        _PIECES,
        "piece(tiles, i_tile * PIECES + i)\n        # [L, N] @ [N, D] -> [L, D]",
        "piece(tiles, i_tile * PIECES)\n",
    ),
    _planted(
        "hopper-wide-delta-dropped",
        "softmax's second gradient term is dropped",
        _WIDE,
        "(b_dpT - gl.expand_dims(b_delta, 0))",
        "b_dpT",
    ),
    _planted(
        "hopper-wide-dk-unscaled",
        "dK lacks the scale",
        _WIDE,
        "given.tiles.k, given.scales.scale, given",
        "given.tiles.k, 1.0, given",
    ),
    _planted(
        "hopper-wide-diagonal-whole",
        "tiles on the diagonal count as whole",
        _WIDE,
        "low * inside, high",
        "0, high",
    ),
    _planted(
        "hopper-wide-sweep-into-first",
        "without a causal mask, dQ of all heads of a group is added up as the first's",
        _WIDE,
        "visits.first_acc + i_sweep * given.n_slots_q",
        "visits.first_acc",
    ),
    _planted(
        "hopper-wide-columns-twice",
        "both warpgroups add the first columns of dQ",
        _WIDE,
        "add_columns(dq_running, 0, FIRST,",
        "add_columns(dq_running, 0, 0,",
    ),
    _planted(
        "hopper-wide-columns-piled",
        "all columns of dQ are added to the first ones",
        _WIDE,
        "target.p_acc + i * (PART * TILE.BLOCK_M)",
        "target.p_acc",
    ),
    _planted(
        "hopper-wide-columns-of-k",
        "columns of dQ are made of a piece's first channels",
        _WIDE,
        ".slice(COLUMN % WIDTH,",
        ".slice(0,",
    ),
    _planted(
        "hopper-wide-order-of-columns",
        "dq's channels are read in another order than they were added in",
        _SUM,
        "o_d % 8 // 2 * 4 + o_d // 8 % 2 * 2 + o_d % 2",
        "o_d % 16",
    ),
)
