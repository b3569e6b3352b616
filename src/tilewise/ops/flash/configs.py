"""One call of flash attention; tile shapes of its kernels, as data, and the pure function that picks one for a problem
and an architecture.

Measured on an H200 (`hopper`); the other families are chosen by compiling for them: no or few spills, and shared memory
that fits the smallest card of the family.
"""

from typing import Literal, NamedTuple

import torch

from tilewise.ops._host.symbol import cached

Kernel = Literal["fwd", "dkdv", "dq"]
Family = Literal["hopper", "blackwell", "medium", "small"]

# Shared memory that one CTA may use, in bytes, on the smallest card of each family.
SHARED_MEMORY: dict[Family, int] = {"hopper": 232_448, "blackwell": 232_448, "medium": 166_912, "small": 101_376}
WIDTHS = (32, 64, 128, 256)


class Inputs(NamedTuple):
    """One call's tensors and numbers: packed where cu_q is given, window limits None or >= 0 (causal is right = 0),
    softcap 0 for none, sinks one a query head or None, num_splits 0 for a number of our choice.

    With a key_stride, key j stands at `j * key_stride` and query i sees it where that is `<= i + right`; left is None
    then, and right may be < 0. Query i stands at `first + i` there, where the sequences have a `first` each.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    key_stride: int | None = None
    sinks: torch.Tensor | None = None
    num_splits: int = 0
    first: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        """Rows of the grid besides its tiles: query heads, of every batch entry where dense."""
        return self.q.shape[-2] * (self.q.shape[0] if self.cu_q is None else 1)

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.q.shape[-2] // self.k.shape[-2]


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
) -> Inputs:
    """Inputs from the public arguments. A limit that cuts nothing is dropped, so that it cannot overflow and lengths
    share a kernel.

    The last query stands at the last key, and sees all keys before it where left is as many; the first sees all after
    it where right has as many as there are queries after it.
    """
    right = 0 if causal else right
    left_cuts, right_cuts = 0 <= left < k.shape[-3] - 1, 0 <= right < q.shape[-3] - 1
    limits = left if left_cuts else None, right if right_cuts else None
    return Inputs(q, k, v, cu_q, cu_k, *limits, scale, softcap, sinks=sinks, num_splits=num_splits)


class Config(NamedTuple):
    """Queries and keys per tile, warps, pipeline stages, whether tiles come through tensor descriptors, and the chunks
    of a group in dK/dV.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    chunks: int = 1


class Problem(NamedTuple):
    """What decides a call's tiles: channels of q and v, keys, bytes per element, and whether tensor descriptors can
    read its tensors.
    """

    channels: int
    value_channels: int
    keys: int
    element_size: int
    descriptors: bool


def family(architecture: int) -> Family:
    """GPUs by tensor cores and shared memory: 9.0, 10.x, 8.0 and 8.7, and the consumer cards and all others."""
    if architecture == 90:
        return "hopper"
    if 100 <= architecture < 110:
        return "blackwell"
    return "medium" if architecture in (80, 87) else "small"


def _tma(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return Config(block_m, block_n, num_warps, num_stages, tma=True)


# (family, bytes an element, kernel) -> for each of WIDTHS the candidates, best first; the last of them needs no
# descriptors.
TABLE: dict[tuple[Family, int, Kernel], tuple[tuple[Config, ...], ...]] = {
    ("hopper", 2, "fwd"): (
        (_tma(64, 128, 4, 3), Config(128, 64, 4, 3)),
        (_tma(64, 128, 4, 2), Config(128, 64, 4, 3)),
        (_tma(128, 128, 8, 3), Config(128, 64, 8, 3)),
        (_tma(128, 64, 8, 2), Config(128, 64, 8, 2)),
    ),
    ("hopper", 2, "dkdv"): (
        (_tma(64, 128, 4, 2), Config(64, 64, 4, 2)),
        (_tma(128, 64, 4, 2), Config(64, 64, 4, 2)),
        (_tma(64, 64, 4, 2), Config(64, 128, 8, 2)),
        (_tma(64, 64, 8, 2), Config(32, 64, 8, 2)),
    ),
    ("hopper", 2, "dq"): (
        (_tma(64, 64, 4, 3), Config(128, 64, 4, 3)),
        (_tma(64, 64, 4, 3), Config(64, 64, 4, 3)),
        (_tma(128, 64, 8, 3), Config(128, 64, 8, 3)),
        (_tma(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ),
    ("medium", 2, "fwd"): (
        (Config(128, 64, 4, 3),),
        (Config(128, 64, 4, 3),),
        (Config(128, 64, 8, 3),),
        (Config(64, 64, 8, 2),),
    ),
    ("medium", 2, "dkdv"): (
        (Config(64, 128, 8, 2),),
        (Config(32, 64, 4, 2),),
        (Config(64, 64, 8, 2),),
        (Config(32, 32, 8, 2),),
    ),
    ("medium", 2, "dq"): (
        (Config(64, 64, 4, 3),),
        (Config(64, 64, 4, 3),),
        (Config(64, 64, 8, 2),),
        (Config(64, 64, 8, 2),),
    ),
    ("small", 2, "fwd"): (
        (Config(128, 64, 4, 3),),
        (Config(128, 64, 4, 3),),
        (Config(128, 64, 8, 3),),
        (Config(64, 32, 8, 2),),
    ),
    ("small", 2, "dkdv"): (
        (Config(64, 128, 8, 2),),
        (Config(32, 64, 4, 2),),
        (Config(64, 64, 8, 2),),
        (Config(32, 32, 8, 2),),
    ),
    ("small", 2, "dq"): (
        (Config(64, 64, 4, 3),),
        (Config(64, 64, 4, 3),),
        (Config(64, 64, 8, 2),),
        (Config(32, 32, 4, 2),),
    ),
}
# Products go through tensor memory there, which leaves dK/dV fewer registers.
TABLE["blackwell", 2, "fwd"] = TABLE["hopper", 2, "fwd"]
TABLE["blackwell", 2, "dq"] = TABLE["hopper", 2, "dq"]
TABLE["blackwell", 2, "dkdv"] = (
    (_tma(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (_tma(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (_tma(64, 64, 8, 2), Config(64, 128, 8, 2)),
    (Config(32, 32, 8, 2),),
)
# fp32 as three TF32 products leaves registers and shared memory for small tiles only, on every GPU.
for _family in SHARED_MEMORY:
    TABLE[_family, 4, "fwd"] = (
        (Config(64, 32, 4, 3),),
        (Config(64, 32, 4, 3),),
        (Config(32, 32, 4, 2),),
        (Config(16, 16, 4, 1),),
    )
    TABLE[_family, 4, "dkdv"] = (
        (Config(32, 32, 4, 2),),
        (Config(32, 32, 4, 2),),
        (Config(32, 32, 8, 2),),
        (Config(16, 16, 4, 1),),
    )
    TABLE[_family, 4, "dq"] = (
        (Config(32, 32, 4, 2),),
        (Config(32, 32, 4, 2),),
        (Config(32, 32, 4, 2),),
        (Config(16, 16, 8, 1),),
    )


# Sequences of at most this many keys: tiles to take in place of the table's, measured on an H200.
SHORT_KEYS = 4096
SHORT: dict[tuple[Family, int, Kernel], dict[int, Config]] = {("hopper", 2, "fwd"): {128: _tma(64, 64, 4, 3)}}
# Of at most this many: building descriptors costs more than they save.
TINY_KEYS = 256


def choose(kernel: Kernel, problem: Problem, architecture: int) -> Config:
    """The tiles for a problem on an architecture (compute capability as one number, 90 for an H100)."""
    channels, value_channels, keys, element_size, descriptors = problem
    descriptors = descriptors and keys > TINY_KEYS
    return _choose(kernel, max(channels, value_channels), keys <= SHORT_KEYS, element_size, descriptors, architecture)


# Not keyed by length: packed training has a new one in every step.
@cached
def _choose(
    kernel: Kernel, widest: int, short: bool, element_size: int, descriptors: bool, architecture: int
) -> Config:
    width = next(limit for limit in WIDTHS if widest <= limit)
    key = family(architecture), element_size, kernel
    candidates = TABLE[key][WIDTHS.index(width)]
    if short and width in SHORT.get(key, {}):
        candidates = (SHORT[key][width], *candidates)
    return next(config for config in candidates if descriptors or not config.tma)


# Programs of dK/dV that fill a large GPU several times over, so that long and short ones even out: 8 for each of an
# H200's 132 SMs.
ENOUGH_PROGRAMS = 132 * 8
# Query tiles that a chunk must have to loop over: a shorter loop costs less than adding chunks up.
LEAST_STEPS = 64


def divide_group(programs: int, group: int, steps: int) -> int:
    """Into how many chunks dK/dV divides a KV head's `group` of query heads, each with `steps` query tiles: a divisor
    of `group`.

    The fewest that make ENOUGH_PROGRAMS of `programs`, which one chunk would have; fewer than that where a chunk would
    be left too little to do.
    """
    allowed = [
        chunks
        for chunks in range(1, group + 1)
        if group % chunks == 0 and (chunks == 1 or group // chunks * steps >= LEAST_STEPS)
    ]
    return next((chunks for chunks in allowed if programs * chunks >= ENOUGH_PROGRAMS), allowed[-1])
