"""What a warpgroup of flash attention's kernels for Hopper computed, under the simulation's names.

Products run ahead: a step's scores are started in the step before, and its sum is ready in the step after. So values
are told apart by the function that assigns them, not by the loop that they are in.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tilewise.ops.flash.hopper.configs import padded, piece
from tilewise.trace.record import Event
from tilewise.trace.values import Lines, Values

ADDED = {"acc_dv": "dV", "b_dq": "dQ_part", "acc_dk": "dK"}
# Of the backward whose warpgroups share the keys: what each computes or multiplies with.
WIDE = ("K", "Q", "S", "P", "dS", "dK"), ("V", "dO", "dP", "dS", "dV")
# Columns of dQ that one of its products makes.
PART = 64


def pieces(channels: int) -> int:
    """In how many pieces a tile of so many channels is."""
    return padded(channels) // piece(padded(channels))


def first_columns(channels: int) -> int:
    """Columns of dQ that the first of two warpgroups adds that share the keys."""
    return padded(channels) // PART // 2 * PART


def joined(events: Sequence[Event], counts: Mapping[tuple[str, str], int]) -> Iterator[Event]:
    """With the pieces of a tile, or the elements of a tuple, as one: `counts` says by function and variable of how
    many.
    """
    parts: dict[tuple[str, str], list[np.ndarray]] = {}
    for event in events:
        name, _, number = event.name.partition(".")
        place = event.function, name
        if place not in counts:
            yield event
            continue
        found = parts.setdefault(place, [])
        if number == "0":
            found.clear()
        found.append(event.value)
        if len(found) == counts[place]:
            yield event._replace(name=name, value=np.concatenate(found, 1))
            found.clear()


class Found:
    """A warpgroup's values under the simulation's names, and where they were assigned."""

    def __init__(self) -> None:
        self.values: Values = {}
        self.lines: Lines = {}

    def keep(self, name: str, event: Event | None, transposed: bool = False) -> None:
        """The value of an event, if there was one."""
        if event is not None:
            self.values[name] = event.value.T if transposed else event.value
            self.lines[name] = f"line {event.line}, in {event.function}"


def of_forward(events: Sequence[Event], channels: int, values: int) -> Found:
    """What a warpgroup computes of its first item."""
    found, step = Found(), -1
    keys = products = None
    of_q, of_v = pieces(channels), pieces(values)
    counts = {
        ("begin_item", "b_q"): of_q,
        ("multiply_rows", "b_right"): of_q,
        ("add_product", "b_right"): of_v,
        ("attend_tile", "acc"): of_v,
        ("attend_item", "acc"): of_v,
        ("write_rows", "b_o"): of_v,
    }
    for event in joined(events, counts):
        place = event.function, event.name
        if place == ("begin_item", "b_q") and "Q" not in found.values:
            found.keep("Q", event)
        elif place == ("multiply_rows", "b_right"):
            keys = event
        elif place in (("attend_items", "b_s"), ("attend_tile", "b_s")):
            products = event
        elif place == ("probabilities", "b_s"):
            if step < 0 or f"P_{step}" in found.values:
                step += 1
                found.keep(f"K_{step}", keys)
                found.keep(f"S_pre_scaling_{step}", products)
            found.keep(f"S_{step}", event)
        elif event.function == "probabilities" and event.name in ("m", "b_p"):
            found.keep(f"{'M' if event.name == 'm' else 'P'}_{step}", event)
        elif place == ("probabilities", "l"):
            # Four threads share a row.
            found.keep(f"L_{step}", event._replace(value=event.value.sum(1)))
        elif place == ("add_product", "b_right"):
            found.keep(f"V_{step}", event)
        elif place == ("attend_tile", "acc"):
            before = f"O_{step - 1}"
            found.keep(before if before not in found.values else f"O_scale_{step}", event)
        elif place == ("attend_item", "acc"):
            found.keep(f"O_{step}", event)
        elif place == ("write_rows", "b_lse"):
            found.keep("LSE", event)
        elif place == ("write_rows", "b_o"):
            found.keep("O_final", event)
            break
    return found


def of_backward(events: Sequence[Event]) -> Found:
    """What a warpgroup computes of its half of a block of keys."""
    found, step = Found(), -1
    latest: dict[str, Event] = {}
    for event in events:
        place = event.function, event.name
        latest[event.name] = event
        if event.name in ("half.b_k", "half.b_v"):
            name = "K" if event.name == "half.b_k" else "V"
            if name not in found.values:
                found.keep(name, event)
        elif place == ("start_scores", "b_q"):
            latest["Q"] = event
        elif place == ("score_gradients", "dp_running"):
            step += 1
            found.keep(f"Q_{step}", latest.get("Q"))
            found.keep(f"dO_{step}", latest.get("queries.b_do"))
        elif place == ("score_gradients", "b_sT"):
            found.keep(f"S_{step}", event, transposed=True)
        elif place == ("score_gradients", "b_pT_or_dv") and f"P_{step}" not in found.values:
            found.keep(f"P_{step}", latest.get("b_pT"), transposed=True)
        elif place in (("score_gradients", "b_dpT"), ("score_gradients", "b_dsT")):
            found.keep(f"{'dP' if event.name == 'b_dpT' else 'dS'}_{step}", event, transposed=True)
        elif event.function == "add_products" and event.name in ADDED:
            found.keep(f"{ADDED[event.name]}_{step}", event)
    return found


def of_wide(events: Sequence[Event], warpgroup: int, channels: int, values: int) -> Found:
    """What a warpgroup computes of a block of keys that both share."""
    found, step = Found(), -1
    first = first_columns(channels)
    own = padded(channels) - first if warpgroup else first
    block, rows, result = ("V", "dO", "dV") if warpgroup else ("K", "Q", "dK")
    each = pieces(values if warpgroup else channels)
    counts = {
        ("weigh_step", "b_k"): each,
        ("differentiate_step", "b_v"): each,
        ("multiply_rows", "b_right"): each,
        ("add_columns", "b_dq"): own // PART,
        ("consume_wide_block", "acc"): each,
    }
    names = {
        ("probabilities", "b_sT"): "S",
        ("weigh_step", "b_pT"): "P",
        ("differentiate_step", "b_dpT"): "dP",
        ("differentiate_step", "b_dsT"): "dS",
    }
    for event in joined(events, counts):
        place = event.function, event.name
        if place in (("weigh_step", "b_k"), ("differentiate_step", "b_v")) and block not in found.values:
            found.keep(block, event)
        elif place == ("multiply_rows", "b_right"):
            step += 1
            found.keep(f"{rows}_{step}", event)
        elif place in names and f"{names[place]}_{step}" not in found.values:
            found.keep(f"{names[place]}_{step}", event, transposed=True)
        elif place == ("start_dq", "b_ds"):
            found.keep(f"dS_{step}", event)
        elif place == ("add_columns", "b_dq"):
            found.keep(f"dQ_part_{step}", event)
        # Before a block's first step it is zero.
        elif place == ("consume_wide_block", "acc") and step >= 0 and f"{result}_{step}" not in found.values:
            found.keep(f"{result}_{step}", event)
    return found
