"""Records that kernels pass around: NamedTuples, so that a field has a name in device code as on the host.

Triton takes a NamedTuple as a kernel's argument, as a constant and as a value made inside a kernel, and compiles to the
same code as for its fields one by one. Fields of a record that is an argument are specialised as plain arguments are
(integers of 1, multiples of 16, aligned pointers), regardless of `do_not_specialize`: a size that changes from
call to call stays a separate parameter. A constant inside a record that a kernel makes is no longer a constant once
the record has a name: pass those in a `tl.constexpr` record. Up to Triton 3.7 a field of that is a plain
number, which jitted functions take as `tl.constexpr` alone (not `tl.zeros` or `tl.cdiv`). Triton 3.6 is stricter: a
record with a field of None is neither compared with None as a whole (ask a field) nor returned from a function, and a
string inside one is assigned to a name before it is passed on.
"""

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Elements from one batch entry, token or head of a tensor to the next; channels are contiguous."""

    batch: Any
    token: Any
    head: Any


class Rows(NamedTuple):
    """The rows of one head of one sequence.

    `x` is a pointer, or with TMA a descriptor over [B, H, T, D] (packed tokens are one batch entry), which needs no
    strides.
    """

    x: Any
    strides: Any
    i_b: Any
    i_h: Any
    start: Any
    """The sequence's first token."""
    n_rows: Any


class Strided(NamedTuple):
    """A tensor that kernels read or write through a pointer."""

    x: Any
    strides: Any


class ReadStrides(NamedTuple):
    """Strides of what kernels read through pointers or descriptors; None for a descriptor, which holds its own."""

    q: Any
    k: Any
    v: Any
    do: Any


class Offsets(NamedTuple):
    """Where packed sequences begin, on the side of the queries and on that of the keys; None where dense. And where
    queries are a part of their sequences, the position of each one's first query.
    """

    q: Any
    k: Any
    first: Any = None


class Packed(NamedTuple):
    """Packed sequences: offsets of the side whose tile a program owns and of the other (None: the same), and the order
    of tiles (`rows.order_tiles_kernel`).
    """

    cu: Any
    cu_other: Any
    tiles: Any


class Place(NamedTuple):
    """The tile that a program owns."""

    i_b: Any
    i_h: Any
    i_row: Any
    """Its first row, counted from the sequence's first."""
    start: Any
    """The sequence's first token."""
    n_rows: Any
    """Of the sequence."""


class Window(NamedTuple):
    """Which keys a query sees: see `mask`. A limit of None does not exist."""

    left: Any
    right: Any
    off: Any
    """Where query 0 stands among the keys' positions."""


class Limits(NamedTuple):
    """A window's limits, for every sequence: how far a query sees to the left and to the right; None: to the end."""

    left: Any
    right: Any


class History(NamedTuple):
    """Which keys a query sees in a sequence of history and targets: see `history`."""

    context: Any
    end: Any
    reach: Any


class Pairs(NamedTuple):
    """Which pairs take part: by the window, or by the history where a kernel has one."""

    window: Any
    history: Any


class Runs(NamedTuple):
    """Bounds of three runs of tiles: masked, whole, masked. Loops over them index it by the run's number."""

    low: Any
    full_low: Any
    full_high: Any
    high: Any


class TailRuns(NamedTuple):
    """The same, and a last run of the tile that reaches past the last row."""

    low: Any
    full_low: Any
    full_high: Any
    tail: Any
    high: Any


class Taps(NamedTuple):
    """Memory for the values of one program: an fp32 buffer of steps, slots a step and elements a slot."""

    buffer: Any
    i_program: Any
    n_slots: Any
    n_elements: Any


class Tile(NamedTuple):
    """Constants of a kernel over tiles of queries and keys: channels, also padded to tiles; rows of tiles; positions
    from key to key (None: as queries); for tiles through TMA see `rows.load_rows`; the precision of products.
    """

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    KEY_STRIDE: Any
    TMA: Any
    PRECISION: Any


class SiluTile(NamedTuple):
    """The same for SiLU attention, and what its mask is: causal, or with targets or a context."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    KEY_STRIDE: Any
    TMA: Any
    PRECISION: Any
    CAUSAL: Any
    HISTORY: Any


class Scales(NamedTuple):
    """Factors of softmax's scores: `scale_log2` in base 2 of what the exponent takes, `score_scale` before softcap
    (None: no softcap), `scale` of dQ and dK.
    """

    scale_log2: Any
    score_scale: Any
    scale: Any


class SiluScales(NamedTuple):
    """Factors of SiLU's weights (see `silu`), of the output and dV, and of dQ and dK."""

    alpha_log2: Any
    gain: Any
    ratio: Any
    factor: Any
    factor_s: Any


class Sinks(NamedTuple):
    """One sink a query head, and where the backward writes what each of its programs' rows add to their gradient; None
    without sinks.
    """

    x: Any
    parts: Any


class RowStats(NamedTuple):
    """What a softmax's backward needs of each query row: see `delta`."""

    lse_log2: Any
    delta: Any


class Heads(NamedTuple):
    """Query heads of a KV head that one program serves, and into how many chunks a GQA group is divided."""

    group: Any
    chunks: Any
