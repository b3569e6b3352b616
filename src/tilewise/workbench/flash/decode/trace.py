"""Attention over a cache: a program of one split, recorded and simulated, and the merge of one row's splits."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tilewise import interpreter
from tilewise.ops.flash.decode import configs, launch, simulate
from tilewise.ops.flash.decode.configs import Config
from tilewise.ops.flash.decode.reference import attend_cached, entry_keys
from tilewise.ops.flash.simulate import Named, Options
from tilewise.trace.beside import Cast, Kernel, array, as_it_is, beside, recorded
from tilewise.trace.record import record
from tilewise.trace.request import HSTU_MASK, Request, Traced, check_tile, entry_of
from tilewise.trace.values import Naming, Values
from tilewise.verify.suite import make_fill
from tilewise.workbench.flash.decode.configs import entries
from tilewise.workbench.operator import Tracing, UsageError

KV_HEADS, GROUP, CHANNELS, TOKENS, PAGE = 2, 2, 64, 2, 16
# A short entry before the traced one, so that a wrong length or page shows.
LEAD = 5
# Tiles of keys in each split; the last split lacks so many keys of its last.
TILES, LACKING = 2, 3

SPLIT = Kernel(
    "flash_decode_kernel",
    "split",
    Naming(
        "S",
        {"K": ("b_k",), "S": ("b_s",), "M": ("m",), "P": ("b_p",), "L": ("l",), "V": ("b_v",), "O": ("acc",)},
        {"Q": ("b_q",)},
        {"O_final": ("b_o",), "LSE": ("b_lse",)},
        first={"S": "S_pre_scaling"},
        masks_scores=True,
    ),
    "block",
)
MERGE = Kernel(
    "flash_decode_merge_kernel",
    "merge",
    Naming("O_part", {"LSE_part": ("b_lse",), "O_part": ("b_o",), "M": ("b_m",), "W": ("b_w",), "O": ("acc",)}),
    "round",
)
MAKERS = {
    "steps": "which keys are the split's, and which of its tiles the mask reaches",
    "Q": "the load of Q: its pointers, or how tokens and heads are packed into rows",
    "K": "the load of K: its page, its row there, or the entry's length",
    "V": "the load of V: its page, its row there, or the entry's length",
    "O_final": "the division by L, or what was stored",
    "LSE_part": "the LSE that each split left",
    "O_part": "the output that each split left",
    "W": "the weight of a split: exp2 of its LSE less the largest so far",
}


@dataclass(frozen=True)
class Case:
    """Two entries in pages of PAGE keys, of LEAD keys and of `keys`; q [2, TOKENS, heads, D], pools of keys and values,
    and the table of their pages.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    keys: int
    config: Config
    causal: bool

    @property
    def options(self) -> Options:
        """As the simulation takes them."""
        return Options(CHANNELS**-0.5, right=0 if self.causal else None)

    @property
    def splits(self) -> simulate.Splits:
        """Of the traced entry."""
        return simulate.split_keys(self.keys, self.asked, self.config.block_n)

    @property
    def asked(self) -> int:
        """num_splits."""
        return -(-self.keys // (TILES * self.config.block_n))

    @property
    def lengths(self) -> torch.Tensor:
        """Of both entries."""
        return torch.tensor([LEAD, self.keys], device=self.q.device)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By the kernels: output and LSE."""
        entries = None, self.lengths, None, self.table, None
        inputs = launch.make_inputs(
            self.q, self.k, self.v, *entries, 0, self.causal, -1, -1, self.options.scale, 0.0, self.asked
        )
        return launch.plan_forward(inputs, self.config)

    def head(self, head: int, cast: Cast) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q of a KV head's query heads, [T, G, D], and its keys and values."""
        k, v = (entry_keys(x, 1, 0, self.keys, self.table)[0][:, head] for x in (self.k, self.v))
        return cast(self.q[1, :, head * GROUP : (head + 1) * GROUP]), cast(k), cast(v)

    def split(self, head: int, number: int, cast: Cast) -> Iterator[Named]:
        """Simulated."""
        return simulate.split(*self.head(head, cast), number, self.splits, self.config.block_n, self.options)

    def whole(self, head: int, token: int) -> Values:
        """O_full, the reference's output in fp64, and O_ref, that in its own precision, of one row."""
        found: Values = {}
        precisions: dict[str, Cast] = {"O_full": lambda x: x.double(), "O_ref": lambda x: x}
        for name, cast in precisions.items():
            q, k, v = (cast(x) for x in (self.q, self.k, self.v))
            o, _ = attend_cached(q, k, v, causal=self.causal, seqused_k=self.lengths, page_table=self.table)
            found[name] = array(o[1, token, head])
        return found


def _trace(case: Case, head: int, number: int) -> list[Traced]:
    """A program of one split, of all tokens with the query heads of a KV head; and the program that merges the last
    token's splits, of the first of these heads.
    """
    # Chunks of a group (here one) of all KV heads, then entries, then splits; under a causal mask the last entry first.
    program = head + KV_HEADS * ((0 if case.causal else 1) + 2 * number)
    token, i_h = TOKENS - 1, head * GROUP
    merging = (TOKENS + token) * KV_HEADS * GROUP + i_h
    with record({SPLIT.name: program, MERGE.name: merging}) as recording:
        o, lse = case.run()
    low = number * case.splits.chunk
    place = f"program {program}, KV head {head}, split {number}, keys {low} to"
    place += f" {min(low + case.splits.chunk, case.keys) - 1}"

    def run(cast: Cast) -> Iterator[Named]:
        # The kernel rescales and adds in one statement.
        return (one for one in case.split(head, number, cast) if not one[0].startswith("O_scale"))

    split = beside(SPLIT, place, recorded(recording, SPLIT), run, as_it_is, {}, MAKERS)
    if case.splits.number == 1:
        return [split]

    def merge(cast: Cast) -> Iterator[Named]:
        row = token * GROUP
        parts = [dict(case.split(head, number, cast)) for number in range(case.splits.number)]
        outputs, lses = (torch.stack([part[name][row] for part in parts]) for name in ("O_final", "LSE"))
        return simulate.merge(outputs, lses, configs.MERGED)

    stored = {"O_final": array(o[1, token, i_h]), "LSE": array(lse[1, i_h, token, None])}
    place = f"program {merging}, query head {i_h}, token {token}, {case.splits.number} splits"
    traced = beside(MERGE, place, recorded(recording, MERGE), merge, as_it_is, stored, MAKERS)
    return [split, replace(traced, beside=case.whole(i_h, token))]


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested split, the merge where there are several, and what they work on."""
    if request.direction == "backward":
        raise UsageError("flash-decode has no backward: leave out --direction backward")
    entry = entry_of(request, entries(), "block_m", "block_n")
    config = entry.config if entry else Config(request.block_m or 16, request.block_n or 32, 4, 1)
    check_tile("block_m", config.block_m)
    check_tile("block_n", config.block_n)
    case = _case(request, config)
    if not 0 <= request.head < KV_HEADS or not 0 <= request.program < case.splits.number:
        raise UsageError(
            f"there are {KV_HEADS} KV heads of {case.splits.number} splits each: expected --head 0 to {KV_HEADS - 1}"
            f" and --program 0 to {case.splits.number - 1}"
        )
    about = {
        "tiles": f"{config.block_m} rows × {config.block_n} keys",
        "keys": f"{case.keys} in pages of {PAGE}, behind an entry of {LEAD}",
        "splits": f"{case.splits.number} of {case.splits.chunk} keys",
        "queries": f"{TOKENS} tokens of {GROUP} query heads for each of {KV_HEADS} KV heads",
        "mask": "causal" if request.causal else "none",
    }
    with interpreter.quiet():
        return _trace(case, request.head, request.program), about


def _case(request: Request, config: Config) -> Case:
    keys = request.seq_blocks * TILES * config.block_n - LACKING
    used = [-(-length // PAGE) for length in (LEAD, keys)]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(request.seed)).to(torch.int32)
    table = torch.full((2, max(used)), -1, dtype=torch.int32)
    for row, pages in zip(table, order.split(used), strict=True):
        row[: len(pages)] = pages
    fill = make_fill(request.fill, request.seed)
    pool = (sum(used), PAGE, KV_HEADS, CHANNELS)
    shapes = {"q": (2, TOKENS, KV_HEADS * GROUP, CHANNELS), "k": pool, "v": pool}
    q, k, v = (fill(name, shape, 1.0).to(request.device, request.precision) for name, shape in shapes.items())
    return Case(q, k, v, table.to(request.device), keys, config, request.causal)


TRACE = Tracing(trace, refuses=("warp", "order", "impl", "names", "against", *HSTU_MASK), taps=False)
