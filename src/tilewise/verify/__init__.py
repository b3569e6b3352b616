"""Any implementation against the reference: outputs, gradients, edge cases, and a score of how many planted bugs the
same check would catch.
"""

from tilewise.verify.api import verify
from tilewise.verify.compare import Comparison, Failure, compare_tensors
from tilewise.verify.implementation import UsageError
from tilewise.verify.result import Check, Finding, MutantResult, Report, Result, Settings

__all__ = [
    "Check",
    "Comparison",
    "Failure",
    "Finding",
    "MutantResult",
    "Report",
    "Result",
    "Settings",
    "UsageError",
    "compare_tensors",
    "verify",
]
