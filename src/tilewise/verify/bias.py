"""Errors that lean to one side: rounding has no direction, so over many cases its mean is close to 0."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tilewise.verify.result import Result

# Standard errors that the mean may be away from 0, and how many cases it takes to know them.
SIGMA = 10.0
FEWEST = 8


def signed_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """The mean of actual - truth in units of the last place of actual's dtype; NaN where all of truth is 0.

    A number small against the others has the last place of their root mean square: it is a sum that cancels, and its
    own last place says nothing.
    """
    if not bool(truth.any()):
        return math.nan
    size = truth.abs().clamp(min=truth.square().mean().sqrt().item())
    place = torch.finfo(actual.dtype).eps * torch.exp2(torch.log2(size).floor())
    return ((actual.double() - truth) / place).mean().item()


@dataclass(frozen=True)
class Bias:
    """A tensor whose errors lean to one side: their mean over cases in units of the last place, and by how many of its
    standard errors that is away from 0.
    """

    operator: str
    implementation: str
    dtype: str
    tensor: str
    mean: float
    sigma: float
    cases: int

    def __str__(self) -> str:
        return (
            f"{self.operator} {self.implementation}: {self.tensor} leans to one side in {self.dtype}: its error is"
            f" {self.mean:+.2g} units of the last place in the mean of {self.cases} cases, {abs(self.sigma):.0f}"
            " standard errors away from 0"
        )


def biases(results: Iterable["Result"]) -> list[Bias]:
    """Of each tensor of an implementation in one dtype, from the means of its cases.

    The errors in one case depend on each other: that of one LSE is in a whole row of probabilities. Cases do not.
    """
    means: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for result in results:
        check = result.check
        for one in result.comparisons:
            if one.passed and not math.isnan(one.bias):
                key = check.operator, str(check.implementation), check.dtype, one.name
                means.setdefault(key, {})[check.case] = one.bias
    found = []
    for key, of_cases in means.items():
        if len(of_cases) >= FEWEST:
            mean, spread = statistics.fmean(of_cases.values()), statistics.stdev(of_cases.values())
            sigma = mean * math.sqrt(len(of_cases)) / spread if spread else 0.0
            if abs(sigma) > SIGMA:
                found.append(Bias(*key, mean, sigma, len(of_cases)))
    return found
