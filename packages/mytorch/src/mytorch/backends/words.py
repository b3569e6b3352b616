"""What backends say to a word that they do not know."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from mytorch.backends.base import BINARY, UNARY


def unknown(call: str, word: str, words: Sequence[str]) -> ValueError:
    """The error for a name that `unary` or `binary`, which `call` is, does not take."""
    near = get_close_matches(word, words, 1)
    return ValueError(
        f"a backend's {call} has no {word!r}: expected one of {', '.join(words)}."
        + (f" Did you mean {near[0]!r}?" if near else " Put together what you need from these.")
    )


class WordsAreNoMethods:
    """Of every backend: says how `backend.mul(x, y)` is meant, where there is no such method."""

    # A type checker would believe that every attribute is there.
    if not TYPE_CHECKING:

        def __getattr__(self, word: str) -> Any:
            if word in UNARY:
                hint = f"it is called as unary({word!r}, x)"
            elif word in BINARY:
                hint = f"it is called as binary({word!r}, x, y)"
            else:
                hint = "mytorch.backends.base lists its methods, and the words that its unary and binary take"
            raise AttributeError(f"a backend has no method {word!r}: {hint}")
