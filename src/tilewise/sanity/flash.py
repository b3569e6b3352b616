"""Flash attention's tile configurations, each run on a problem of its own."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import SHARED_MEMORY, SHORT, TABLE, WIDTHS, Config, Family, Kernel
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.fill import make_fill

HEADS = 2


class Entry(NamedTuple):
    """One configuration: the kernel it is for, bytes an element, channels, and the tiles."""

    kernel: Kernel
    element_size: int
    channels: int
    config: Config

    @property
    def short(self) -> str:
        """One word."""
        dtype = "bf16" if self.element_size == 2 else "fp32"
        tiles = f"{self.config.block_m}x{self.config.block_n}"
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}-w{self.config.num_warps}-s{self.config.num_stages}{'-tma' if self.config.tma else ''}"

    @property
    def operations(self) -> int:
        """Of one step: 2 for each multiplication and addition of its products."""
        products = {"fwd": 2, "dkdv": 4, "dq": 3}[self.kernel]
        return 2 * products * self.config.block_m * self.config.block_n * self.channels

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: two tiles."""
        rows = self.config.block_m if self.kernel == "dkdv" else self.config.block_n
        return 2 * rows * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: those that stay, and those in flight (a pipeline of n stages holds n - 1 ahead)."""
        block_d, block_dv = tile_widths(self.channels, self.channels, self.element_size)
        stay, stream = (self.config.block_n, self.config.block_m) if self.kernel == "dkdv" else (self.config.block_m, self.config.block_n)
        kept = stay * (block_d if self.kernel == "fwd" else block_d + block_dv)
        return (kept + max(1, self.config.num_stages - 1) * stream * (block_d + block_dv)) * self.element_size

    def fits(self) -> list[str]:
        """Families of GPUs that it is chosen for."""
        return [family for family in SHARED_MEMORY if self.config in _row(family, self.element_size, self.kernel, self.channels)]


def _row(family: Family, element_size: int, kernel: Kernel, channels: int) -> tuple[Config, ...]:
    """All tiles for this width, those for short sequences included."""
    key = family, element_size, kernel
    short = SHORT.get(key, {})
    return TABLE[key][WIDTHS.index(channels)] + ((short[channels],) if channels in short else ())


def entries() -> list[Entry]:
    """Every configuration of the table, once."""
    rows = ((*key, channels) for key in TABLE for channels in WIDTHS)
    return list(
        dict.fromkeys(
            Entry(kernel, size, channels, config) for family, size, kernel, channels in rows for config in _row(family, size, kernel, channels)
        )
    )


@dataclass(frozen=True)
class Outcome:
    """What one tensor of one configuration came to."""

    name: str
    actual: torch.Tensor
    truth: torch.Tensor
    eager: torch.Tensor


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration makes, beside fp64 truth and eager torch's; `small` is two tiles each way, else 37 tokens more."""
    config = entry.config
    if config.tma and (device.type != "cuda" or architecture(device) < 90):
        config = config._replace(tma=False)
    tokens = 2 * max(config.block_m, config.block_n) + (0 if small else 37)
    dtype = torch.bfloat16 if entry.element_size == 2 else torch.float32
    fill = make_fill(fill_rule, 42)
    shape = (1, tokens, HEADS, entry.channels)
    q, k, v, do = (fill(name, shape, 1.0).to(dtype).to(device) for name in ("q", "k", "v", "do"))
    inputs = launch.make_inputs(q, k, v, None, None, True, -1, -1, entry.channels**-0.5, 0.0)
    plain = configs.choose("fwd", inputs.problem(), architecture(device))
    reference = partial(flash_attention, causal=True)
    if entry.kernel == "fwd":
        ours = dict(zip(("o", "lse"), launch.forward(inputs, config), strict=True))
        truth = dict(zip(("o", "lse"), reference(q.double(), k.double(), v.double()), strict=True))
        eager = dict(zip(("o", "lse"), reference(q, k, v, compute_dtype=dtype), strict=True))
        eager["lse"] = reference(q, k, v, compute_dtype=torch.float32)[1]
        return [Outcome(name, ours[name], truth[name], eager[name]) for name in ours]
    o, lse = launch.forward(inputs, plain)
    dq, dk, dv = launch.backward(inputs, o, lse, do, None, config if entry.kernel == "dkdv" else None, config if entry.kernel == "dq" else None)
    truth_gradients, eager_gradients = _gradients(reference, q, k, v, do, torch.float64), _gradients(reference, q, k, v, do, dtype)
    names = {"dq": 0} if entry.kernel == "dq" else {"dk": 1, "dv": 2}
    return [Outcome(name, (dq, dk, dv)[i], truth_gradients[i], eager_gradients[i]) for name, i in names.items()]


def _gradients(
    reference: partial[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    o, _ = reference(*leaves, compute_dtype=dtype)
    return torch.autograd.grad(o, leaves, do.to(dtype))
