"""Tile shapes of the SiLU attention kernels, as data, and the pure function that picks one for a problem and an
architecture.

Measured on an H200 (`hopper`); the other families are chosen by compiling for them: no or few spills, and shared memory
that fits the smallest card of the family.
"""

from typing import Literal, NamedTuple

from tilewise.ops._host.symbol import cached
from tilewise.ops.flash.configs import Family, family

Kernel = Literal["fwd", "dkdv", "dq"]

# Channels of q and v together, padded to tiles.
WIDTHS = (128, 256, 512)


class Config(NamedTuple):
    """Queries and keys per tile, warps, pipeline stages, whether tiles come through tensor descriptors, and registers a
    thread may take.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    registers: int | None = None


class Problem(NamedTuple):
    """What decides a call's tiles: channels of q and v together, bytes per element, whether tensor descriptors can
    read its tensors, and whether all their strides are multiples of 16, so that Triton loads rows in wide words.
    """

    channels: int
    element_size: int
    descriptors: bool
    wide_words: bool


def _tma(block_m: int, block_n: int, num_warps: int, num_stages: int, registers: int | None = None) -> Config:
    return Config(block_m, block_n, num_warps, num_stages, True, registers)


# (family, bytes an element, kernel) -> for each of WIDTHS the candidates, best first; the last of them needs no
# descriptors.
TABLE: dict[tuple[Family, int, Kernel], tuple[tuple[Config, ...], ...]] = {
    ("hopper", 2, "fwd"): (
        (Config(64, 64, 4, 3, registers=128),),
        (_tma(64, 64, 4, 3), Config(128, 64, 8, 3)),
        (_tma(128, 64, 8, 2), Config(128, 64, 8, 2)),
    ),
    ("hopper", 2, "dkdv"): (
        (Config(32, 64, 4, 3, registers=128),),
        (_tma(64, 64, 4, 2), Config(64, 128, 8, 2)),
        (_tma(32, 64, 8, 2), Config(32, 64, 8, 2)),
    ),
    ("hopper", 2, "dq"): (
        (_tma(64, 64, 4, 2, 128), Config(64, 64, 4, 3, registers=128)),
        (_tma(64, 64, 4, 2), Config(128, 64, 8, 3)),
        (_tma(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ),
    ("medium", 2, "fwd"): ((Config(128, 64, 4, 3),), (Config(128, 64, 8, 3),), (Config(64, 64, 8, 2),)),
    ("medium", 2, "dkdv"): ((Config(32, 64, 4, 2),), (Config(64, 64, 8, 2),), (Config(32, 32, 8, 2),)),
    ("medium", 2, "dq"): ((Config(64, 64, 4, 3),), (Config(64, 64, 8, 2),), (Config(64, 64, 8, 2),)),
    ("small", 2, "fwd"): ((Config(128, 64, 4, 3),), (Config(128, 64, 8, 3),), (Config(64, 32, 8, 2),)),
    ("small", 2, "dkdv"): ((Config(32, 64, 4, 2),), (Config(64, 64, 8, 2),), (Config(32, 32, 8, 2),)),
    ("small", 2, "dq"): ((Config(64, 64, 4, 3),), (Config(64, 64, 8, 2),), (Config(32, 32, 4, 2),)),
}
TABLE["blackwell", 2, "fwd"] = ((_tma(128, 64, 4, 3), Config(128, 64, 4, 3)), *TABLE["hopper", 2, "fwd"][1:])
TABLE["blackwell", 2, "dq"] = ((_tma(64, 64, 4, 3), Config(64, 64, 4, 3)), *TABLE["hopper", 2, "dq"][1:])
# Products go through tensor memory there, which leaves dK/dV fewer registers.
TABLE["blackwell", 2, "dkdv"] = (
    (_tma(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (_tma(64, 64, 8, 2), Config(64, 128, 8, 2)),
    (Config(32, 32, 8, 2),),
)
# fp32 as three TF32 products leaves registers and shared memory for small tiles only, on every GPU.
_FAMILIES: tuple[Family, ...] = ("hopper", "blackwell", "medium", "small")
for _family in _FAMILIES:
    TABLE[_family, 4, "fwd"] = ((Config(64, 32, 4, 3),), (Config(32, 32, 4, 2),), (Config(16, 16, 8, 1),))
    TABLE[_family, 4, "dkdv"] = ((Config(32, 32, 4, 2),), (Config(32, 32, 8, 2),), (Config(16, 16, 8, 1),))
    TABLE[_family, 4, "dq"] = ((Config(32, 32, 4, 2),), (Config(32, 32, 4, 2),), (Config(16, 16, 8, 1),))


@cached
def choose(kernel: Kernel, problem: Problem, architecture: int) -> Config:
    """The tiles for a problem on an architecture (compute capability as one number, 90 for an H100)."""
    width = next(i for i, limit in enumerate(WIDTHS) if problem.channels <= limit)
    candidates = TABLE[family(architecture), problem.element_size, kernel][width]
    config = next(config for config in candidates if problem.descriptors or not config.tma)
    # Element by element, each needs its own address: no registers to save.
    return config if config.tma or problem.wide_words else config._replace(registers=None)
