"""An audit of offsets: every operator's launches at sizes that no machine holds, for 32-bit overflow, accesses out of
bounds and grid limits.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from tilewise import workbench


@dataclass(frozen=True)
class AuditResult:
    """One launch: its operator and kernel, the sizes in words, how many programs it has, and what is wrong with it."""

    operator: str
    kernel: str
    sizes: str
    programs: int
    wrong: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong


def audit(operator_names: Sequence[str]) -> list[AuditResult]:
    """Audit the launches of operators, one process a part, as many at a time as there are cores.

    A UsageError names unknown ones.
    """
    audits: dict[str, tuple[str, ...]] = {name: workbench.find(name, "audit").load("audit") for name in operator_names}
    # What operators share is audited once.
    parts = list(dict.fromkeys(part for found in audits.values() for part in found))
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        found = dict(zip(parts, pool.map(_audit_part, parts), strict=True))
    return [
        AuditResult(name, entry["kernel"], entry["sizes"], entry["programs"], tuple(entry["wrong"]))
        for name in audits
        for part in audits[name]
        for entry in found[part]
    ]


def _audit_part(part: str) -> list[dict[str, Any]]:
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tilewise.inspect.audit_worker", part]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode != 0:
        raise RuntimeError(
            f"the audit of {part} did not end well (exit code {result.returncode}): {result.stderr.strip()[-2000:]}"
        )
    entries: list[dict[str, Any]] = json.loads(result.stdout)
    return entries


def print_audit(results: Sequence[AuditResult], console: Console) -> bool:
    """A line for each kernel and size, with what is wrong below; returns whether all passed."""
    for result in results:
        mark = "[green]✓[/]" if result.passed else "[red]✗[/]"
        console.print(
            f"{mark} {result.operator} {result.kernel} [dim]{escape(result.sizes)}; {result.programs:,} programs[/]",
            highlight=False,
        )
        for line in result.wrong:
            console.print(f"    {line}", markup=False, highlight=False)
    failed = sum(not result.passed for result in results)
    verdict = (
        f"FAIL: {failed} of {len(results)} launches"
        if failed
        else f"PASS: all {len(results)} launches fit 32-bit numbers and grid limits"
    )
    console.print(verdict, highlight=False)
    return not failed
