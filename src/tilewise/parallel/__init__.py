"""One sequence over several processes."""

from tilewise.parallel.balance import balanced
from tilewise.parallel.plan import ContextPlan
from tilewise.parallel.windows import Windows

__all__ = ["ContextPlan", "Windows", "balanced"]
