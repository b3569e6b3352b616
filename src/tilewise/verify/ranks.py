"""The ranks of a group, processes of this machine that talk by gloo. What each does is in rank.py."""

import io
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilewise import interpreter
from tilewise.verify.implementation import RankError
from tilewise.verify.planting import plant
from tilewise.verify.suite import Mutant
from tilewise.verify.worker import how_it_ended, start_process

# Seconds that a rank waits for another, and that all are waited for: ranks that wait for one another give up before.
GROUP_LIMIT, ANSWER_LIMIT = 60.0, 240.0
# A method of rank.py's Call, and its arguments.
Message = tuple[str, dict[str, Any]]


class Ranks:
    """To be started; they start again after an error, for the others may still wait for what never comes."""

    def __init__(self, world: int, mutant: Mutant | None = None) -> None:
        self.world = world
        self._mutant = mutant
        self._started: list[tuple[Connection, Any]] = []

    def ask(self, messages: Sequence[Message]) -> list[Any]:
        """What each rank answers to its message; a RankError where one raises, ends or does not answer."""
        try:
            self.start()
            for (connection, _), message in zip(self._started, messages, strict=True):
                connection.send_bytes(_packed(message))
            return self._answers()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Unless they are."""
        if self._started:
            return
        self._folder = tempfile.mkdtemp()
        store = str(Path(self._folder) / "store")
        self._started = [start_process(_serve, rank, self.world, store, self._mutant) for rank in range(self.world)]
        # Each says that it is there: what a planted bug does before that is none.
        self._answers()

    def _answers(self) -> list[Any]:
        missing = dict(enumerate(self._started))
        found: dict[int, Any] = {}
        while missing:
            ready = wait(
                [x for connection, process in missing.values() for x in (connection, process.sentinel)], ANSWER_LIMIT
            )
            if not ready:
                raise RankError(f"no answer from rank {', '.join(map(str, missing))} within {ANSWER_LIMIT:.0f} seconds")
            for rank, (connection, process) in list(missing.items()):
                if connection not in ready and process.sentinel not in ready:
                    continue
                try:
                    found[rank], error = _unpacked(connection.recv_bytes())
                except (EOFError, OSError):
                    process.join()
                    error = how_it_ended(process.exitcode)
                if error:
                    raise RankError(f"rank {rank} of {self.world}: {error}")
                del missing[rank]
        return [found[rank] for rank in range(self.world)]

    def stop(self) -> None:
        """End them."""
        for connection, process in self._started:
            process.kill()
            process.join()
            connection.close()
        if self._started:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._started = []


def _packed(x: Any) -> bytes:
    """Not as multiprocessing sends tensors: that would move the sender's into shared memory."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _serve(connection: Connection, rank: int, world: int, store: str, mutant: Mutant | None) -> None:
    """A rank: answers messages, by (answer, error)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore", ".*failed, switching to", UserWarning)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if mutant:
        plant(mutant)
    torch.set_num_threads(1)
    interpreter.use_where_no_gpu()
    if sys.platform == "linux":
        # gloo would take the address of the host's name, which may lead elsewhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=GROUP_LIMIT)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=limit)
    # After a bug is planted.
    from tilewise.verify.attempt import error_finding
    from tilewise.verify.rank import Call

    call = Call()
    connection.send_bytes(_packed((None, "")))
    while True:
        name, arguments = _unpacked(connection.recv_bytes())
        try:
            answer = getattr(call, name)(**arguments), ""
        except Exception as error:
            answer = None, error_finding(error).message
        connection.send_bytes(_packed(answer))


def _end_with_parent() -> None:
    """Also in the middle of what never ends."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
