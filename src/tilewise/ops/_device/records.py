"""Records that kernels pass around: NamedTuples, so that a field has a name in device code as on the host.

Triton takes a NamedTuple as a kernel's argument, as a constant and as a value made inside a kernel, and compiles to the
same code as for its fields one by one. Fields of a record that is an argument are specialised as plain arguments are
(whole numbers of 1, multiples of 16, aligned pointers), whatever `do_not_specialize` says: a size that changes from
call to call stays a parameter of its own.
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


class Scales(NamedTuple):
    """Factors of softmax's scores: `scale_log2` in base 2 of what the exponent takes, `score_scale` before softcap
    (None: no softcap), `scale` of dQ and dK.
    """

    scale_log2: Any
    score_scale: Any
    scale: Any
