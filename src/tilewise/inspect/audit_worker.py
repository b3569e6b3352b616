"""Audits one part of an operator in a separate process, and prints the results as JSON: `python -m
tilewise.inspect.audit_worker MODULE:FUNCTION`.

The process interprets kernels (TRITON_INTERPRET=1), but launches are those of a GPU. The operators are patched for the
whole process, which does nothing else and ends.
"""

import json
import sys
from collections.abc import Iterator

from tilewise.ops._host import backend

# Launchers use larger tiles where kernels are interpreted; they check on import, which is below.
backend._INTERPRETING = False


def audit_part(part: str) -> Iterator[dict[str, object]]:
    """One entry per launch: kernel, sizes in words, programs and errors."""
    from tilewise.inspect.audit import can_interpret, faults, limits
    from tilewise.inspect.audit_memory import has_values, tables
    from tilewise.workbench.operator import load

    _launch_end_chunks()
    for case in load(part)():
        for launch in case.launches():
            if has_values(launch.arguments.values()):
                # What it makes of offsets, later launches read: fresh memory would lead them anywhere.
                launch.run()
            wrong = [*limits(launch), *(faults(launch, tables(launch.arguments)) if can_interpret(launch) else [])]
            yield {"kernel": launch.kernel.__name__, "sizes": case.sizes, "programs": launch.grid, "wrong": wrong}


def _launch_end_chunks() -> None:
    """If there are thousands of chunks of tokens, only the first and the last chunk are launched.

    Only those are kept anyway, and building the others takes a minute and gigabytes per case.
    """
    from tilewise.ops.nsa.selected import index
    from tilewise.ops.nsa.selected.index import Named

    chunks = index.chunks

    def ends(named: Named, bytes_a_token: int) -> list[index.Chunk]:
        found = chunks(named, bytes_a_token)
        return [*found[:1], *found[1:][-1:]]

    index.chunks = ends


if __name__ == "__main__":
    print(json.dumps(list(audit_part(sys.argv[1]))))
