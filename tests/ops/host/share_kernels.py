"""Compiles kernels that are none, for tests/ops/host/test_compiling.py: `share_kernels.py FOLDER COUNT [daemonic]`.

A kernel takes 0.1 s and is kept in FOLDER, where Triton's cache would keep it. What is compiled is appended to
FOLDER/compiled.
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path

from tilewise.ops._host import compiling
from tilewise.ops._host.compiling import Task, compile_all


def compile_one(folder: Path, number: int) -> None:
    if not (folder / f"kernel-{number}").exists():
        time.sleep(0.1)
        (folder / f"kernel-{number}").touch()
        with (folder / "compiled").open("a") as file:
            file.write(f"{number} {os.getpid()}\n")


def work(folder: Path, count: int) -> None:
    # It takes seconds, and not the same in each process.
    compiling.cache.triton_key = lambda: ""
    (folder / f"ready-{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.005)
    compile_all([Task(f"kernel-{i}", lambda i=i: compile_one(folder, i)) for i in range(count)])


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    if sys.argv[3:]:
        process = multiprocessing.get_context("spawn").Process(target=work, args=(folder, count), daemon=True)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    work(folder, count)
