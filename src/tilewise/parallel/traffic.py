"""What of keys and values travels between ranks, and what each holds for it: counted from an assignment, as flash.py,
ring.py and exchange.py do it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tilewise.parallel import flash
from tilewise.parallel.assignment import Runs, gathers_all, needed, sums

Tensor = torch.Tensor
Direction = Literal["forward", "backward"]

# Bytes of an element of q, k, v and what becomes of them, and of an fp32 number.
ITEM, WIDE = 2, 4
# Causal.
BEFORE = -1, 0


class Layer(NamedTuple):
    """An attention layer's heads, and their channels in q and k, and in v."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Of a row of K and V of one head."""
        return self.dim + self.value_dim

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


class Rows(NamedTuple):
    """In an exchange of the keys that ranks need, by rank: rows that it holds, needs and sends, its own included;
    whether all are gathered, the same number from each.
    """

    held: Tensor
    needed: Tensor
    sent: Tensor
    gathers: bool

    @property
    def room(self) -> Tensor:
        """Rows of buffers while they are on their way here."""
        if self.gathers:
            return torch.full_like(self.held, len(self.held) * int(self.held.max()))
        return self.needed + self.sent


def exchanged(runs: Runs, bounds: Tensor, world: int) -> Rows:
    """Under a causal mask."""
    needs = needed(runs, bounds, *BEFORE)
    held = sums(runs.stops - runs.starts, runs.ranks, world)
    of_needs = sums(needs.stops - needs.starts, needs.ranks, world)
    # How many ranks need each token, summed up to where runs begin and end.
    points, order = torch.cat((needs.starts, needs.stops)).sort()
    readers = torch.cat((torch.ones_like(needs.starts), -torch.ones_like(needs.stops)))[order].cumsum(0)
    summed = torch.zeros_like(points)
    summed[1:] = (readers[:-1] * points.diff()).cumsum(0)
    upto = []
    for x in (runs.starts, runs.stops):
        place = torch.searchsorted(points, x, right=True) - 1
        upto.append(summed[place] + readers[place] * (x - points[place]))
    sent = sums(upto[1] - upto[0], runs.ranks, world)
    return Rows(held, of_needs, sent, gathers_all(needs, int(bounds[-1]), world))


class Calls(NamedTuple):
    """By rank: whether it makes several calls for the same keys, as where it holds two pieces of a sequence; the most
    queries of one of them; whether these are not side by side, so that calls take copies.
    """

    several: Tensor
    queries: Tensor
    scattered: Tensor


def calls_of(runs: Runs, sequences: int, world: int) -> Calls:
    """A call takes a piece of each sequence. Pieces of one token have no mask, and so calls of their own."""
    single = (runs.stops - runs.starts == 1).long()
    keys, of = ((single * world + runs.ranks) * sequences + runs.sequences).unique(return_inverse=True)
    ranks = keys // max(1, sequences)
    pieces = torch.zeros_like(keys).index_add_(0, of, torch.ones_like(of))
    largest = torch.zeros_like(keys).scatter_reduce_(0, of, runs.stops - runs.starts, "amax")
    most = torch.zeros(2 * world, dtype=torch.int64).scatter_reduce_(0, ranks, pieces, "amax")
    several = most.view(2, world).sum(0) > 1
    return Calls(several, sums(largest, ranks % world, world), several & (sequences > 1))


class Traffic(NamedTuple):
    """By rank, float64 `[w]`: bytes of K and V that it sends and receives, of their gradients, and that it holds at the
    peak, with inputs and results. It computes in so many steps, for which keys come so many times.
    """

    sent: Tensor
    received: Tensor
    gradients_sent: Tensor
    gradients_received: Tensor
    memory: Tensor
    steps: int
    transfers: int


def traffic(runs: Runs, bounds: Tensor, world: int, layer: Layer, method: str, direction: Direction) -> Traffic:
    """Of one layer, causal. Kernels' own workspace is not in it."""
    rows = exchanged(runs, bounds, world)
    calls = calls_of(runs, len(bounds) - 1, world)
    if world == 1:
        none = torch.zeros(1, dtype=torch.float64)
        return Traffic(none, none, none, none, rows.held.double() * _own(layer, direction), 1, 1)
    if method == "ring":
        packed = len(bounds) > 2
        # Of packed sequences a call has all keys of a rank, and leaves some out: of queries too.
        keys = rows.held.max() if packed else calls.queries.max()
        calls = calls._replace(scattered=torch.full_like(calls.several, packed))
        return _passed(rows, calls, int(keys), layer, direction)
    return _gathered(rows, calls, layer, direction)


def _own(layer: Layer, direction: Direction) -> float:
    """Bytes of a local row of inputs and results."""
    kv = layer.kv_heads * layer.channels * ITEM
    q, o = layer.heads * layer.dim * ITEM, layer.heads * layer.value_dim * ITEM
    forward = q + kv + o + layer.heads * WIDE
    return float(forward if direction == "forward" else forward + o + q + kv)


def _differentiating(calls: Calls, queries: Tensor, layer: Layer, here: Tensor, part: Tensor, item: int) -> Tensor:
    """Bytes that parts.differentiate holds at the most: `queries` are rows of one query head in a call, `here` and
    `part` bytes of the keys and values that are here and that a call takes, `item` those of an element of dq.
    """
    dq = queries * layer.dim * ITEM
    copies = calls.scattered * queries * ((layer.dim + 2 * layer.value_dim) * ITEM + WIDE)
    added = queries * layer.dim * item * (1 + calls.scattered.long())
    # Sums in fp32: two calls' results, or dq being added to, or the sums being rounded.
    several = 2 * here + torch.maximum(2 * dq + 2 * part, dq + part + torch.maximum(added, here))
    return copies + torch.where(calls.several, several, here + dq + part + added)


def _gathered(rows: Rows, calls: Calls, layer: Layer, direction: Direction) -> Traffic:
    """K and V of some heads at a time."""
    held, needs, sends, room = (x.double() for x in (rows.held, rows.needed, rows.sent, rows.room))
    heads = flash.heads_that_fit(layer.kv_heads, int(held.sum()) * layer.channels * ITEM)
    steps = -(-layer.kv_heads // heads)
    row = layer.kv_heads * layer.channels * ITEM
    sent = (room - room / len(held) if rows.gathers else sends - held) * row
    received = sent if rows.gathers else (needs - held) * row
    # Of the heads of one step.
    here, coming, going = (x * (heads * layer.channels * ITEM) for x in (needs, room, needs + sends))
    queries = calls.queries.double() * (heads * layer.group)
    if direction == "forward":
        # Of two calls: a result lives until there is the next.
        results = queries * (2 * (layer.value_dim * ITEM + WIDE) + calls.scattered * layer.dim * ITEM)
        # V is still in its buffer when K is put in order.
        beside = torch.maximum(here + results + coming * (steps > 1), coming + here * layer.dim / layer.channels)
        back = home = torch.zeros_like(held)
    else:
        both = coming + going if steps > 2 else torch.maximum(coming, going)
        computing = here + _differentiating(calls, queries, layer, here, here, ITEM) + both * (steps > 1)
        # The gradients of keys and values, and what is sent of them.
        beside = torch.maximum(computing, 2 * here + going + coming * (steps > 1))
        home, back = (needs - held) * row, (sends - held) * row
    return Traffic(sent, received, home, back, held * _own(layer, direction) + beside, steps, steps)


def _passed(rows: Rows, calls: Calls, keys: int, layer: Layer, direction: Direction) -> Traffic:
    """K and V of each rank in turn, so many rows of them in a call."""
    held, world = rows.held.double(), len(rows.held)
    row = layer.kv_heads * layer.channels * ITEM
    sent, received = (held.sum() - held.roll(-1)) * row, (held.sum() - held) * row
    block = held.max() * row
    queries = calls.queries.double() * layer.heads
    if direction == "forward":
        # What a rank computes with, its own at first, and what comes.
        blocks = min(2, world - 1) * block
        # A part in 16 bits; both weighted, their sum, and the one before, in fp32.
        merging = queries * (layer.value_dim * (ITEM + 4 * WIDE) + 4 * WIDE)
        copies = queries * calls.scattered * (layer.value_dim * WIDE + layer.dim * ITEM)
        # In fp32 until the end.
        o = held * (layer.heads * layer.value_dim * (WIDE - ITEM))
        memory = held * _own(layer, direction) + o + blocks + merging + copies
        back = home = torch.zeros_like(held)
    else:
        # Those two, then gradients that go, and come.
        blocks = min(4, world) * block
        gradients = held * (layer.heads * layer.dim * ITEM + row)
        step = blocks + _differentiating(calls, queries, layer, block, torch.full_like(held, keys * row), WIDE)
        # In fp32 from the start, in 16 bits at the end alone.
        memory = held * _own(layer, direction) + gradients + torch.maximum(step, gradients)
        home, back = received, (world - 1) * held * row
    return Traffic(sent, received, home, back, memory, world, world - 1)


def sparse_memory(runs: Runs, bounds: Tensor, world: int, layer: Layer, blocks: int, direction: Direction) -> Tensor:
    """Bytes that native sparse attention, with so many blocks a query, holds beside what dense attention does."""
    rows = exchanged(runs, bounds, world)
    o, gates = layer.heads * layer.value_dim * ITEM, 3 * layer.heads * ITEM
    # The outputs and LSEs of three branches next to their sum, gates, and blocks.
    kept = 3 * o + 2 * layer.heads * WIDE + gates + layer.kv_heads * blocks * WIDE
    if direction == "forward" or world == 1:
        return rows.held.double() * kept
    heads = flash.heads_that_fit(layer.kv_heads, int(rows.held.sum()) * layer.channels * ITEM)
    # Gradients of gates, of one branch's output while the next one's is made, and of keys and values in fp32 before the
    # last branch's are added.
    gradients = gates + 2 * heads * layer.group * layer.value_dim * ITEM
    return rows.held.double() * (kept + gradients) + rows.needed.double() * (heads * layer.channels * WIDE)
