"""Einstein's summation, out of the products, sums and arrangements that tensors have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mytorch.tensor import Tensor

# A letter, or for an axis of an ellipsis its number, counted from the ellipsis' end: -1 is the last.
Label = str | int
Labels = list[Label]


def contract(equation: str, tensors: Sequence[Tensor]) -> Tensor:
    """`Tensor.einsum`: from left to right, two tensors at a time."""
    if len(tensors) == 1 and isinstance(tensors[0], list | tuple):
        (tensors,) = tensors
    inputs, output = labelled(equation, tensors)
    parts = [diagonal(x, labels) for x, labels in zip(tensors, inputs, strict=True)]
    refuse_unequal(equation, parts)
    x, labels = parts[0]
    for i, part in enumerate(parts[1:], 1):
        needed = {*output, *(label for _, later in parts[i + 1 :] for label in later)}
        x, labels = product(summed(x, labels, {*part[1], *needed}), summed(*part, {*labels, *needed}), needed)
    x, labels = summed(x, labels, set(output))
    return arranged(x, labels, output)


def labelled(equation: str, tensors: Sequence[Tensor]) -> tuple[list[Labels], Labels]:
    """The labels of each tensor's axes, and those of the result."""
    if not isinstance(equation, str):
        raise TypeError(f"einsum takes an equation such as 'ij,jk->ik' first, not {type(equation).__name__}")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise ValueError(f"einsum's {equation!r} names {len(terms)} tensors, and {len(tensors)} came")
    inputs = [term_labels(equation, term, x.shape) for term, x in zip(terms, tensors, strict=True)]
    letters: Labels = [label for labels in inputs for label in labels if isinstance(label, str)]
    numbers = [label for labels in inputs for label in labels if isinstance(label, int)]
    dots: Labels = list(range(min(numbers, default=0), 0))
    if not arrow:
        return inputs, [*dots, *sorted(letter for letter in letters if letters.count(letter) == 1)]
    before, ellipsis, after = halves(equation, right)
    for letter in before + after:
        if letter not in letters:
            raise ValueError(f"einsum's {equation!r} has {letter!r} in its result and in none of its tensors")
    if len({*before, *after}) != len(before + after):
        raise ValueError(f"einsum's {equation!r} names an axis of its result twice: each letter stands there once")
    return inputs, [*before, *(dots if ellipsis else []), *after]


def halves(equation: str, term: str) -> tuple[str, str, str]:
    """The letters before an ellipsis, the ellipsis where there is one, the letters behind it."""
    before, ellipsis, after = term.partition("...")
    if not all(letter.isascii() and letter.isalpha() for letter in before + after):
        raise ValueError(
            f"einsum's {equation!r} has {term!r}: expected letters, one an axis, and at most one '...', as in"
            " '...ij,jk->...ik'"
        )
    return before, ellipsis, after


def term_labels(equation: str, term: str, shape: Sequence[int]) -> Labels:
    """A label for each axis of a tensor."""
    before, ellipsis, after = halves(equation, term)
    rest = len(shape) - len(before + after)
    if rest < 0 or (rest and not ellipsis):
        raise ValueError(
            f"einsum's {equation!r} names {len(before + after)} axes with {term!r}, and the tensor has {len(shape)}:"
            f" {list(shape)}"
        )
    return [*before, *range(-rest, 0), *after]


def refuse_unequal(equation: str, parts: Iterable[tuple[Tensor, Labels]]) -> None:
    """Axes of one letter have one length, or 1."""
    lengths: dict[Label, int] = {}
    for x, labels in parts:
        for label, n in zip(labels, x.shape, strict=True):
            known = lengths.setdefault(label, n)
            if n not in (1, known) and known != 1:
                name = f"{label!r}" if isinstance(label, str) else "an axis of '...'"
                raise ValueError(f"einsum's {equation!r} gives {name} two lengths, {known} and {n}: they must be equal")
            lengths[label] = n if known == 1 else known


def diagonal(x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Axes of one letter as one axis, along their diagonal."""
    for label in set(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            n = x.shape[first]
            if x.shape[second] != n:
                raise ValueError(
                    f"einsum takes the diagonal of axes of one length for {label!r}, not of {list(x.shape)}"
                )
            others = [i for i in range(len(labels)) if i not in (first, second)]
            flat = x.permute(*others, first, second).reshape(*(x.shape[i] for i in others), n * n)
            # From one element of the diagonal to the next it is a row and an element.
            x, labels = flat[..., :: n + 1], [*(labels[i] for i in others), label]
    return x, labels


def summed(x: Tensor, labels: Labels, kept: set[Label]) -> tuple[Tensor, Labels]:
    """Over the axes that are not kept."""
    axes = tuple(i for i, label in enumerate(labels) if label not in kept)
    return (x.sum(axes), [label for label in labels if label in kept]) if axes else (x, labels)


def arranged(x: Tensor, labels: Labels, order: Labels) -> Tensor:
    """With its axes in another order."""
    return x if labels == order else x.permute([labels.index(label) for label in order])


def shaped(x: Tensor, *lengths: int) -> Tensor:
    """In a shape; itself where it has it."""
    return x if x.shape == lengths else x.reshape(lengths)


def product(left: tuple[Tensor, Labels], right: tuple[Tensor, Labels], needed: set[Label]) -> tuple[Tensor, Labels]:
    """Of two tensors, summed over the labels that both have and nothing needs afterwards."""
    lengths = [dict(zip(labels, x.shape, strict=True)) for x, labels in (left, right)]
    gone = {label for label in left[1] if label in right[1] and label not in needed}
    # Where one side has length 1, its element meets the sum of the other's.
    alone = {label for label in gone if lengths[0][label] != lengths[1][label]}
    gone -= alone
    (x, of_x), (y, of_y) = (summed(z, labels, {*labels} - alone) for z, labels in (left, right))
    shared = [label for label in of_x if label in of_y and label not in gone]
    inner = [label for label in of_x if label in gone]
    rows = [label for label in of_x if label not in of_y]
    columns = [label for label in of_y if label not in of_x]
    x, y = arranged(x, of_x, [*shared, *rows, *inner]), arranged(y, of_y, [*shared, *inner, *columns])
    n, m = len(shared), len(shared) + len(rows)
    high, wide = x.shape[n:m], y.shape[n + len(inner) :]
    if inner:
        depth = math.prod(x.shape[m:])
        out = shaped(x, *x.shape[:n], math.prod(high), depth) @ shaped(y, *y.shape[:n], depth, math.prod(wide))
        out = shaped(out, *out.shape[:n], *high, *wide)
    else:
        out = shaped(x, *x.shape, *(1,) * len(wide)) * shaped(y, *y.shape[:n], *(1,) * len(high), *wide)
    return out, [*shared, *rows, *columns]
