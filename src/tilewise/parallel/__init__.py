"""One sequence over several processes."""

from tilewise.parallel.balance import balanced
from tilewise.parallel.plan import ContextPlan

__all__ = ["ContextPlan", "balanced"]
