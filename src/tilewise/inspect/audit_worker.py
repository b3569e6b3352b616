"""Audits one part of an operator in a process of its own, and prints the results as JSON: `python -m tilewise.inspect.audit_worker PART`.

The process interprets kernels (TRITON_INTERPRET=1), while launches are those of a GPU.
"""

import json
import sys
from collections.abc import Iterator

from tilewise.ops._host import backend

# Launchers take larger tiles where kernels are interpreted; they look when they are imported, which is below.
backend._INTERPRETING = False


def audit_part(part: str) -> Iterator[dict[str, object]]:
    """One entry a launch: kernel, sizes in words, programs and what is wrong."""
    from tilewise.inspect.audit_cases import cases
    from tilewise.inspect.audit_run import can_interpret, faults, limits
    from tilewise.inspect.audit_tables import tables

    for case in cases(part):
        for launch in case.launches():
            wrong = [*limits(launch), *(faults(launch, tables(launch.arguments)) if can_interpret(launch) else [])]
            yield {"kernel": launch.kernel.__name__, "sizes": case.sizes, "programs": launch.grid, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(list(audit_part(sys.argv[1]))))
