"""Which calls the Gluon kernels for Hopper take, and their tiles: data, and pure functions of the problem.

Chosen by what an H200 measured, and by compiling for sm_90 with the assembler of Triton 3.6: forward no spills, but for
a few bytes at 192 and 256 channels and under softcap (those of later releases spill some hundred bytes in masked loops
at 64), and shared memory that a CTA may have.
"""

from typing import Literal, NamedTuple

from tilewise.ops._host.symbol import cached
from tilewise.ops.flash.configs import TINY_KEYS, Problem

Direction = Literal["forward", "backward"]
# In which order blocks of keys add to the accumulators of dQ: a fixed one, or freely, to accumulators that the first
# block zeroes lazily (opened) or that are zeroed up front (cleared).
Order = Literal["fixed", "opened", "cleared"]

ARCHITECTURE = 90
# Channels padded to tiles: TMA fills with zeros.
WIDTHS = (64, 128, 192, 256)
# Below the first, portable kernels have as much to do and less to set up.
NARROWEST, WIDEST = 33, 256
# Above this width, the sums of dK and dV of a warpgroup's own keys do not fit its registers: warpgroups share keys.
OWN_KEYS = 128

# Queries of one warpgroup of the forward.
ROWS = 64
# Keys and values that stay in the L2 cache (50 MB on an H100 and an H200) besides all else that goes through it.
CACHED_BYTES = 32 << 20


class Forward(NamedTuple):
    """Keys a tile; tiles of K, and of V, in shared memory; warpgroups; items whose Q is there too; O in Q's place."""

    block_n: int
    stages: int
    groups: int = 2
    slots: int = 2
    o_in_q: bool = False

    @property
    def block_m(self) -> int:
        """Queries of an item."""
        return ROWS * self.groups


class Registers(NamedTuple):
    """Registers per thread: at kernel start, later for warps that compute and for the one that fetches, in multiples
    of 8.

    A CTA has 65,536, 512 for 128 threads, and the fetching warp counts as a warpgroup.
    """

    start: int
    compute: int
    fetch: int


# By warpgroups that compute.
REGISTERS = {2: Registers(168, 240, 24), 3: Registers(128, 160, 32)}
# (channels of q and k, of v), padded.
FORWARD: dict[tuple[int, int], Forward] = {
    (64, 64): Forward(128, 4, groups=3),
    (64, 128): Forward(128, 3),
    (64, 192): Forward(64, 4),
    (64, 256): Forward(64, 3),
    (128, 64): Forward(128, 3),
    (128, 128): Forward(128, 2),
    (128, 192): Forward(64, 2),
    (128, 256): Forward(64, 2),
    (192, 64): Forward(64, 4, slots=1),
    (192, 128): Forward(64, 3, slots=1),
    (192, 192): Forward(64, 2, slots=1),
    (192, 256): Forward(64, 2, slots=1),
    (256, 64): Forward(64, 3, slots=1),
    (256, 128): Forward(64, 2, slots=1),
    (256, 192): Forward(64, 2, slots=1),
    (256, 256): Forward(64, 2, slots=1, o_in_q=True),
}
# With softcap, whose tanh takes registers: smaller tiles in place of those.
FORWARD_CAPPED: dict[tuple[int, int], Forward] = {
    widths: Forward(64, 4) for widths in ((64, 64), (64, 128), (128, 64), (128, 128))
}
# Up to this many keys, where a limit to the right cuts them (causal): half of a tile at the diagonal is masked, so
# smaller ones.
SHORT_KEYS = 2048
FORWARD_SHORT: dict[tuple[int, int], Forward] = {(64, 64): Forward(64, 8, groups=3)}


class Backward(NamedTuple):
    """Queries of a tile; keys of a block, half of them for each of two warpgroups; query tiles, and blocks, in memory;
    whether scores start early.
    """

    block_m: int
    block_n: int
    stages: int
    slots: int = 1
    ahead: bool = False


# A left limit of at most this share of the keys makes blocks about equally long.
NARROW = 0.25
# At 64 channels the scores of the next tile are started before this one's dQ, and the next block's keys are fetched
# during this one: at 128 there are no registers for the first, nor for addresses that differ from block to block.
BACKWARD: dict[tuple[int, int], Backward] = {
    (64, 64): Backward(64, 128, 4, slots=2, ahead=True),
    (64, 128): Backward(64, 128, 2),
    (128, 64): Backward(64, 128, 2),
    (128, 128): Backward(64, 128, 2),
    (128, 192): Backward(64, 64, 3),
    (128, 256): Backward(64, 64, 2),
    (192, 64): Backward(64, 64, 3),
    (192, 128): Backward(64, 64, 3),
    (192, 192): Backward(64, 64, 3),
    (192, 256): Backward(64, 64, 2),
    (256, 64): Backward(64, 64, 3),
    (256, 128): Backward(64, 64, 2),
    (256, 192): Backward(64, 64, 2),
    (256, 256): Backward(64, 64, 2),
}


@cached
def padded(channels: int) -> int:
    """Channels padded to a tile."""
    return next(width for width in WIDTHS if channels <= width)


def piece(width: int) -> int:
    """Channels of one matrix in shared memory, of a tile's: a power of two, as tensors must have."""
    return width & -width


def is_wide(channels: int, value_channels: int) -> bool:
    """Whether warpgroups of the backward share the keys."""
    return max(channels, value_channels) > OWN_KEYS


def why_not(direction: Direction, problem: Problem, capped: bool) -> str | None:
    """Why keys and channels of a 16-bit problem are not for the Hopper kernels; None where they are."""
    channels, values = problem.channels, problem.value_channels
    if problem.keys <= TINY_KEYS:
        return f"at most {TINY_KEYS} keys"
    widest = max(channels, values)
    name = "D" if channels >= values else "Dv"
    if widest < NARROWEST:
        return f"{name} {widest}, below {NARROWEST}"
    if widest > WIDEST:
        return f"{name} {widest}"
    if (channels | values) % 8 != 0:
        return f"D {channels} or Dv {values} is not a multiple of 8"
    if direction == "backward" and (padded(channels), padded(values)) not in BACKWARD:
        return f"backward of D {channels} and Dv {values}"
    if direction == "backward" and capped and is_wide(channels, values):
        return f"backward of {name} {widest} under softcap"
    return None


def choose_forward(channels: int, value_channels: int, keys: int, capped: bool, left: bool, right: bool) -> Forward:
    """The forward's tiles for `keys` keys, under softcap or not, and with limits to the left and right or without."""
    return _choose_forward(channels, value_channels, keys <= SHORT_KEYS, capped, left, right)


# Not keyed by length: packed training has a new one in every step.
@cached
def _choose_forward(channels: int, value_channels: int, short: bool, capped: bool, left: bool, right: bool) -> Forward:
    widths = padded(channels), padded(value_channels)
    config = FORWARD_CAPPED.get(widths, FORWARD[widths]) if capped else FORWARD[widths]
    if right and not left and not capped and short:
        config = FORWARD_SHORT.get(widths, config)
    # One loop more, for the tiles that the left limit cuts, takes registers that three warpgroups do not have.
    return config._replace(groups=2) if left else config


def sweeps_heads(group: int, left: int | None, right: int | None, keys: int) -> bool:
    """Whether a block of keys of the backward sweeps over its query tiles once for each head of its group, so that
    blocks share the L2 cache.

    Not if causal, unless under a narrow window: the shorter block would be done with a head first, and wait for the
    longer one before it at the next.
    """
    equally_long = right is None or (left is not None and left <= NARROW * keys)
    return group > 1 and equally_long


@cached
def choose_backward(channels: int, value_channels: int) -> Backward:
    """The backward's tiles."""
    return BACKWARD[padded(channels), padded(value_channels)]


def shared_bytes(config: Forward, channels: int, value_channels: int) -> int:
    """Shared memory that the tiles take, in bytes; barriers take some hundred more."""
    width, value_width = padded(channels), padded(value_channels)
    rows = config.block_m * (
        config.slots * width + (0 if config.o_in_q else value_width)
    ) + config.stages * config.block_n * (width + value_width)
    return 2 * rows


def heads_together(heads: int, group: int, bytes_a_kv_head: int, limited: bool) -> int:
    """How many of `heads` (of all batch entries) are interleaved, tile by tile, in groups of `group` for each
    KV head.

    Where keys to the right are masked (`limited`), items differ in length: heads side by side let the longest items of
    several heads come first, so that short ones fill the gaps at the end; as many as keep K and V in the L2 cache. Else
    head by head, for the same reason.
    """
    if not limited:
        return 1
    return max(1, min(heads, group * max(1, CACHED_BYTES // max(1, bytes_a_kv_head))))
