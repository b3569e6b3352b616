"""A tile configuration of attention kernels that walk tiles of keys, or of queries for dK and dV."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash.configs import Family

Kernel = Literal["fwd", "dkdv", "dq"]


class Tiles(Protocol):
    """What every such configuration has."""

    @property
    def block_m(self) -> int:
        """Queries per tile."""

    @property
    def block_n(self) -> int:
        """Keys per tile."""

    @property
    def num_warps(self) -> int:
        """Warps per program."""

    @property
    def num_stages(self) -> int:
        """Stages of its pipeline."""

    @property
    def tma(self) -> bool:
        """Whether tiles are loaded through tensor descriptors."""


Config = TypeVar("Config", bound=Tiles)


@dataclass(frozen=True)
class TiledEntry(Generic[Config]):
    """One configuration: the kernel it is for, bytes per element, channels, the tiles, and the families of GPUs that it
    is chosen for.
    """

    kernel: Kernel
    element_size: int
    channels: int
    config: Config
    families: tuple[Family, ...]

    @property
    def short(self) -> str:
        """One word."""
        dtype = "bf16" if self.element_size == 2 else "fp32"
        config = self.config
        tiles = (
            f"{config.block_m}x{config.block_n}-w{config.num_warps}-s{config.num_stages}{'-tma' if config.tma else ''}"
        )
        # Not every operator's configurations have a limit of registers.
        registers = getattr(config, "registers", None)
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}{f'-r{registers}' if registers else ''}"

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its products."""
        products = {"fwd": 2, "dkdv": 4, "dq": 3}[self.kernel]
        return 2 * products * self.config.block_m * self.config.block_n * self.channels

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: two tiles."""
        rows = self.config.block_m if self.kernel == "dkdv" else self.config.block_n
        return 2 * rows * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: resident ones, and those in flight (a pipeline of n stages
        holds n - 1 ahead).
        """
        block_d, block_dv = tile_widths(self.channels, self.channels, self.element_size)
        stay, stream = (
            (self.config.block_n, self.config.block_m)
            if self.kernel == "dkdv"
            else (self.config.block_m, self.config.block_n)
        )
        kept = stay * (block_d if self.kernel == "fwd" else block_d + block_dv)
        return (kept + max(1, self.config.num_stages - 1) * stream * (block_d + block_dv)) * self.element_size

    def fits(self) -> list[str]:
        """Those families by name."""
        return list(self.families)


def entries_of(
    keys: Iterable[tuple[Family, int, Kernel]],
    widths: Sequence[int],
    row: Callable[[Family, int, Kernel, int], Sequence[Config]],
) -> list[TiledEntry[Config]]:
    """Every configuration of a table, once: `row` gives those of a family, bytes an element, kernel and width."""
    families: dict[tuple[Kernel, int, int, Config], list[Family]] = {}
    for family, size, kernel in keys:
        for channels in widths:
            for config in dict.fromkeys(row(family, size, kernel, channels)):
                families.setdefault((kernel, size, channels, config), []).append(family)
    return [TiledEntry(*entry, tuple(found)) for entry, found in families.items()]
