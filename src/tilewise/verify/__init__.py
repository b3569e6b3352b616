"""Checks any implementation against the reference: outputs, gradients, edge cases; and scores how many planted bugs the
same checks catch.
"""

from tilewise.verify.api import verify
from tilewise.verify.compare import Comparison, Failure, compare_tensors
from tilewise.verify.result import Check, Finding, MutantResult, Report, Result, Settings
from tilewise.workbench.operator import UsageError

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
