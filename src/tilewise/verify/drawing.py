"""How further problems are drawn: the sizes and scales that every operator's `draw` has.

Hypothesis shrinks a failure to the first alternative and the least number, so the simplest comes first. All strategies
are hypothesis's, which is imported on use: other projects' tests may lack it.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.verify.suite import Problem, Suite

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# The longest length that is drawn; and where Triton interprets the kernels.
LONGEST, INTERPRETED = 4096, 300
MOST_HEADS, MOST_SEQUENCES, MOST_CHANNELS, FEW = 16, 12, 256, 64
# The most tokens of a packed sequence that is not the last.
SHORT = 100
# Shorter sequences cost as much as one tile.
TILE = 64
# So few examples hypothesis draws independently, besides the simplest.
ROUND = 8

Draw = Callable[[Any], Any]


def tokens(longest: int, least: int = 0) -> "SearchStrategy[int]":
    """A length: mostly short, sometimes any."""
    from hypothesis import strategies as st

    return st.one_of(*(st.integers(least, max(least, min(most, longest))) for most in (40, 100, 150, 200, longest)))


def packed(draw: Draw, longest: int, count: int | None = None, least: int = 0) -> tuple[int, ...]:
    """Lengths of `count` packed sequences, by default of any number of them; at most `longest` in all. The last has
    `least` tokens or more, and it alone may be long.
    """
    from hypothesis import strategies as st

    lengths: list[int] = []
    for _ in range((draw(st.integers(1, MOST_SEQUENCES)) if count is None else count) - 1):
        lengths.append(draw(st.integers(0, min(SHORT, longest - least - sum(lengths)))))
    return (*lengths, draw(tokens(longest - sum(lengths), least)))


class Room:
    """What a drawn problem may cost: as many scores in all as one head of the longest sequence has, four times as many
    rows, and FEW channels, more where scores are fewer.
    """

    def __init__(self, longest: int, pairs: Iterable[tuple[int, int]]) -> None:
        found = [(max(queries, TILE), max(keys, TILE)) for queries, keys in pairs]
        rows = sum(max(one) for one in found)
        # What its heads so far compute, and how many more there may be of each.
        self._longest, self._scores = longest, max(1, sum(queries * keys for queries, keys in found))
        self._heads = max(1, min(longest * longest // self._scores, 4 * longest // max(rows, 1)))

    def batch(self, draw: Draw) -> int:
        """How many sequences."""
        return self._take(draw, MOST_SEQUENCES)

    def heads(self, draw: Draw, least: int = 1) -> int:
        """How many heads."""
        return self._take(draw, MOST_HEADS, least)

    def grouped_heads(self, draw: Draw) -> dict[str, Any]:
        """H, and Hk where query heads share KV heads."""
        group = self._take(draw, MOST_HEADS)
        kv_heads = self._take(draw, MOST_HEADS // group)
        return {"H": group * kv_heads, "Hk": kv_heads if group > 1 else None}

    def channels(self, least: int = 1) -> "SearchStrategy[int]":
        """Channels: mostly few."""
        from hypothesis import strategies as st

        # However many heads, what may be interpreted may have any channels.
        times = max(1, max(self._longest, 2 * INTERPRETED) ** 2 // self._scores)
        found = st.integers(least, FEW) | st.integers(least, MOST_CHANNELS)
        return found.map(lambda channels: min(channels, FEW * times))

    def _take(self, draw: Draw, most: int, least: int = 1) -> int:
        from hypothesis import strategies as st

        # Drawn from the same range always: what depends on a length would keep hypothesis from shrinking that.
        count = least + int(draw(st.integers(0, most - least))) % max(1, min(most, self._heads) - least + 1)
        self._heads, self._scores = max(1, self._heads // count), self._scores * count
        return count


def evenly(low: float, high: float) -> "SearchStrategy[float]":
    """Positive numbers of two digits, evenly by their logarithm to base 10, which lies between these."""
    from hypothesis import strategies as st

    return st.integers(round(100 * low), round(100 * high)).map(
        lambda hundredths: float(f"{10 ** (hundredths / 100):.2g}")
    )


def scale(draw: Draw, signs: tuple[int, ...] = (1, -1, 0), high: int = 1) -> float | None:
    """The default, or from 0.001 to 10 ** `high`, with one of these signs."""
    from hypothesis import strategies as st

    sign = draw(st.none() | st.sampled_from(signs))
    return sign if sign is None else float(sign * draw(evenly(-3, high)))


def softcap(draw: Draw) -> float:
    """None, or from 0.1 to 50."""
    from hypothesis import strategies as st

    return float(draw(st.just(0.0) | evenly(-1, 1.7)))


def drawn(suite: Suite, seed: int, count: int, longest: int) -> list[Problem]:
    """Different problems, the same ones for the same seed."""
    found: list[Problem] = []
    for_each(lambda draw: suite.draw(draw, longest), found.append, seed, count)
    return list(dict.fromkeys(found))


def for_each(draw: Callable[[Draw], Any], test: Callable[[Any], None], seed: int, count: int) -> None:
    """Call `test` with `count` examples of what `draw` makes, and with the simplest in between; what fails is shrunk,
    and raised.

    In rounds: after ten examples hypothesis copies parts of one into the next, which fits tests that cost nothing. Here
    each should tell something new.
    """
    with _files_aside():
        for first in range(0, count, ROUND):
            _round(draw, test, f"{seed} {first}", 1 + min(ROUND, count - first))


@contextlib.contextmanager
def _files_aside() -> Iterator[None]:
    """Hypothesis's files are not left in the user's working directory; other tests of this process keep theirs."""
    from hypothesis import configuration

    usual = vars(configuration).get("__hypothesis_home_directory")
    configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "tilewise-hypothesis")
    try:
        yield
    finally:
        configuration.set_hypothesis_home_dir(usual)


def _round(draw: Callable[[Draw], Any], test: Callable[[Any], None], seed: str, count: int) -> None:
    import hypothesis
    from hypothesis import strategies as st

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(st.composite(draw)())
    def run(example: Any) -> None:
        test(example)

    run()
