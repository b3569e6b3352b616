"""What failing cases have in common that passing ones have not."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from tilewise import workbench
from tilewise.verify.problem import Problem
from tilewise.verify.result import Result
from tilewise.verify.suite import GROWTH, Suite

TILES = (128, 64, 32, 16)


def patterns(results: Sequence[Result]) -> list[str]:
    """Sentences for each operator and implementation with cases that failed and cases that passed."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.check.case != GROWTH:
            groups.setdefault((result.check.operator, str(result.check.implementation)), []).append(result)
    sentences = []
    for (operator, implementation), group in groups.items():
        suite: Suite = workbench.find(operator).load("suite")
        failed = {result.check.case for result in group if not result.passed}
        # A case with nothing but zeros in it passes whatever else is wrong.
        passed = {result.check.case for result in group if any(c.max_diff for c in result.comparisons)} - failed
        common = _common([suite.find(name).problem for name in failed], [suite.find(name).problem for name in passed])
        if common:
            sentences.append(
                f"{operator} {implementation}: {common} in all {len(failed)} cases that failed, and in none of the"
                f" {len(passed)} that passed"
            )
    return sentences


def _common(failed: Sequence[Problem], passed: Sequence[Problem]) -> str:
    """The first trait, or pair of traits, that parts the two, given enough of both for it not to be chance."""
    traits = _traits(failed[0]) if failed else []
    # Each trait by the failed cases that have it, and by the passed ones.
    table = [(name, [has(problem) for problem in failed], [has(problem) for problem in passed]) for name, has in traits]
    shared = [(name, among_passed) for name, among_failed, among_passed in table if all(among_failed)]
    shared += [
        (_negated(name), [not has for has in among_passed])
        for name, among_failed, among_passed in table
        if not any(among_failed)
    ]
    if len(failed) >= 2 and len(passed) >= 2:
        for name, among_passed in shared:
            if not any(among_passed):
                return name
    if len(failed) >= 4 and len(passed) >= 4:
        for (one, among_one), (other, among_other) in itertools.combinations(shared, 2):
            if not any(a and b for a, b in zip(among_one, among_other, strict=True)):
                return f"{one} and {other}"
    return ""


def _negated(name: str) -> str:
    return name.replace(" is ", " is not ", 1) if " is not " not in name else name.replace(" is not ", " is ", 1)


def _traits(example: Problem) -> list[tuple[str, Callable[[Problem], bool]]]:
    traits: list[tuple[str, Callable[[Problem], bool]]] = []
    for tile in TILES:
        traits.append(
            (f"a sequence is longer than {tile}", partial(_any_length, lambda length, tile: length > tile, tile))
        )
        traits.append(
            (
                f"a length is not a multiple of {tile}",
                partial(_any_length, lambda length, tile: length % tile != 0, tile),
            )
        )
    for field in dataclasses.fields(example):
        traits.append((f"{field.name} is given", partial(_is_given, field.name, field.default)))
    return traits


def _is_given(name: str, default: object, problem: Problem) -> bool:
    return bool(getattr(problem, name) != default)


def _any_length(test: Callable[[int, int], bool], tile: int, problem: Problem) -> bool:
    return any(test(length, tile) for length in problem.tokens())
