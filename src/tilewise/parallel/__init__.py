"""One sequence over several processes."""

from tilewise.parallel.plan import ContextPlan

__all__ = ["ContextPlan"]
