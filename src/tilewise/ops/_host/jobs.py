"""How many kernels are compiled at a time. No Triton here: commands that only start helpers ask too."""

import os

VARIABLE = "TILEWISE_COMPILE_JOBS"


def jobs() -> int:
    """TILEWISE_COMPILE_JOBS, or this rank's share of the cores that the process may use."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise ValueError(
                f"{VARIABLE} is {asked!r}: expected how many kernels to compile at a time, 1 for one after the other"
            )
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))
