"""Bugs planted in flash attention over ranks: in which tokens a rank has, in what is sent, in what becomes of it."""

from tilewise.verify.suite import Mutant

_PLAN, _ASSIGNMENT, _EXCHANGE, _CALLS, _FLASH, _PARTS, _RING = (
    f"parallel.{name}" for name in ("plan", "assignment", "exchange", "calls", "flash", "parts", "ring")
)

# Of the exchange, in sparse attention too.
EXCHANGED = (
    Mutant(
        "halo-short",
        "of the keys before a rank's chunk one too few is fetched",
        _ASSIGNMENT,
        "runs.starts - min(left, tokens)",
        "runs.starts - min(left, tokens) + 1",
    ),
    Mutant(
        "keys-in-rank-order",
        "gathered keys stay in the order of ranks",
        _EXCHANGE,
        "received.index_select(0, self._place)",
        "received[: len(self._place)]",
    ),
    Mutant(
        "reduced-twice",
        "gradients of keys and values are added twice",
        _EXCHANGE,
        "total.index_add_(0, rows, part.to(wide))",
        "total.index_add_(0, rows, part.to(wide), alpha=2)",
    ),
    Mutant(
        "not-reduced",
        "the last rank's gradients of keys and values replace the others'",
        _EXCHANGE,
        "total.index_add_(0, rows, part.to(wide))",
        "total.index_copy_(0, rows, part.to(wide))",
    ),
)

MUTANTS = (
    *EXCHANGED,
    Mutant(
        "chunks-swapped",
        "a rank has the tail of its neighbour",
        _ASSIGNMENT,
        "torch.minimum(number, pieces - 1 - number)",
        "number % world",
    ),
    Mutant(
        "positions-local",
        "positions count a rank's own tokens",
        _PLAN,
        "numbers(mine.starts - begins, mine.stops - begins)",
        "numbers(mine.rows, mine.rows + mine.stops - mine.starts)",
    ),
    Mutant(
        "positions-by-one-chunk",
        "a rank takes its second chunk for the one that follows its first",
        _PLAN,
        "runs.sequences, runs.starts - begins, runs.stops - begins, runs.rows",
        "runs.sequences, runs.rows, runs.rows + runs.stops - runs.starts, runs.rows",
    ),
    Mutant(
        "halo-short-after",
        "of the keys behind a rank's chunk one too few is fetched",
        _ASSIGNMENT,
        "runs.stops + min(right, tokens)",
        "runs.stops + max(min(right, tokens) - 1, 0)",
    ),
    Mutant(
        "wrong-slot",
        "of what was gathered, the slot of the next rank is read",
        _EXCHANGE,
        "here.owners * self._most + here.rows",
        "(here.owners + 1) % self._world * self._most + here.rows",
    ),
    Mutant(
        "padding-first",
        "slots of what was gathered are taken for as long as this rank's",
        _EXCHANGE,
        "here.owners * self._most + here.rows",
        "here.owners * self._count + here.rows",
    ),
    Mutant(
        "home-in-token-order",
        "gradients go home as if keys had come in the order of tokens",
        _EXCHANGE,
        "sent = gradient.index_select(0, self._came)",
        "sent = gradient.clone()",
    ),
    Mutant(
        "shift-forgotten",
        "where keys end behind the queries, the window is not as far",
        _CALLS,
        "left + shift if cuts_left else -1",
        "left if cuts_left else -1",
    ),
    Mutant(
        "causal-late",
        "a query sees the key behind it",
        _CALLS,
        "right - shift if cuts_right else -1",
        "right - shift + 1 if cuts_right else -1",
    ),
    Mutant(
        "cut-of-the-first-query",
        "a window that cuts nothing from the first query's keys is taken for none",
        _CALLS,
        "last - 1 - left > start",
        "first - left > start",
    ),
    Mutant(
        "gap-attended",
        "packed keys between two parts of a call belong to the first",
        _CALLS,
        "cu_k += (one.key_row, one.key_row + one.keys)",
        "cu_k += (cu_k[-1], one.key_row + one.keys)",
    ),
    Mutant(
        "dq-overwritten",
        "of a rank's chunks with shared queries the last one's dq stays",
        _PARTS,
        "rows.add(dq, call.rows, dq_part)",
        "rows.put(dq, call.rows, dq_part.to(dq.dtype))",
    ),
    Mutant(
        "lse-gradient-lost",
        "the gradient of the LSE does not reach the kernels",
        _PARTS,
        "arguments = (do_rows, dlse_rows,",
        "arguments = (do_rows, None,",
    ),
    Mutant(
        "sinks-counted-by-rank",
        "the gradient of the sinks is the whole on every rank",
        _FLASH,
        "dsinks.to(sinks.dtype)",
        "(plan.world * dsinks).to(sinks.dtype)",
    ),
    Mutant(
        "sinks-by-rank-in-a-ring",
        "so it is in a ring",
        _RING,
        "dsinks = None if sinks is None else _of_sinks(sinks, o, lse, do, dlse)",
        "dsinks = None if sinks is None else plan.world * _of_sinks(sinks, o, lse, do, dlse)",
    ),
    Mutant(
        "sinks-at-every-step",
        "each part of a ring counts the sinks",
        _RING,
        "parts.attend(call, rows, options, q, (keys, values))",
        "parts.attend(call, rows, options, q, (keys, values), sinks)",
    ),
    Mutant(
        "no-maximum",
        "LSEs are merged without their maximum",
        _RING,
        "total = torch.logaddexp(lse, lse_part)",
        "total = (lse.exp() + lse_part.exp()).log()",
    ),
    Mutant(
        "not-rescaled",
        "a merged output keeps its old maximum",
        _RING,
        "return o * _weights(lse, total) + o_part",
        "return o + o_part",
    ),
    Mutant(
        "one-step-short",
        "the last step of a ring is left out",
        _RING,
        "for step in range(plan.world):",
        "for step in range(max(plan.world - 1, 1)):",
    ),
    Mutant(
        "homecoming-lost",
        "in a ring the last gradients of keys and values do not arrive",
        _RING,
        "arrive() dsinks =",
        "dsinks =",
    ),
)
