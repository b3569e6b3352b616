"""A few processes that talk by gloo, for tests of what runs over several: started once, they run function after
function.
"""

import atexit
import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from datetime import timedelta

WORLD = 4
SECONDS = 30


def serve(rank, store, pipe, path):
    """In a process: run what comes."""
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD, timeout=limit)
    # A group of its own has torch's half an hour, unless it is told.
    groups = {world: dist.new_group(list(range(world)), timeout=limit) for world in range(1, WORLD + 1)}
    # Of two ranks, to be broken by a test.
    groups["impatient"] = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    while True:
        module, name, world, arguments = pipe.recv()
        try:
            found = getattr(importlib.import_module(module), name)(groups[world], *arguments)
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}", traceback.format_exc()))
        else:
            pipe.send((found, None, None))


class Processes:
    """WORLD of them."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        store = tempfile.mktemp()
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, store, theirs, sys.path), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        atexit.register(self.stop)

    def stop(self):
        for process in self.processes:
            process.kill()

    def results(self, function, world, *arguments):
        """(result, error, traceback) of `function(group, *arguments)` on each rank of a group of so many."""
        pipes = self.pipes[: 2 if world == "impatient" else world]
        for pipe in pipes:
            pipe.send((function.__module__, function.__name__, world, arguments))
        for pipe in pipes:
            assert pipe.poll(4 * SECONDS), "a rank hangs"
        return [pipe.recv() for pipe in pipes]

    def run(self, function, world, *arguments):
        """What it returns on each rank; an error on any is one here."""
        found = self.results(function, world, *arguments)
        for rank, (_, error, where) in enumerate(found):
            assert error is None, f"rank {rank}: {where}"
        return [result for result, _, _ in found]


_started = []


def processes():
    """Started at the first call."""
    if not _started:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _started.append(Processes())
    return _started[0]
