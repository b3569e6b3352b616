"""Implementations that misbehave, for worker processes to run."""

import os
import signal
import subprocess
import time

import torch

from tilewise import workbench
from tilewise.ops.flash.reference import flash_attention

SMALL = workbench.find("flash").load("suite").find("small").problem


def right(q, k, v, *, return_lse=False, **options):
    return flash_attention(q, k, v, **options)


def crashes_when_causal(q, k, v, *, return_lse=False, causal=False, **options):
    if causal:
        os.kill(os.getpid(), signal.SIGSEGV)
    return flash_attention(q, k, v, **options)


def hangs(q, k, v, **options):
    time.sleep(1000)


def spins(q, k, v, **options):
    while True:
        pass


def spins_unless_small(q, k, v, **options):
    small = q.shape[-3] == SMALL.T
    return right(q, k, v, **options) if small else spins(q, k, v)


def is_stopped(q, k, v, **options):
    """For four seconds, once: as little of a core comes to it on a machine with too many jobs."""
    if not stopped:
        stopped.append(subprocess.Popen(["sh", "-c", f"sleep 4; kill -CONT {os.getpid()}"]))
        os.kill(os.getpid(), signal.SIGSTOP)
    return right(q, k, v, **options)


stopped = []


def exits(q, k, v, **options):
    os._exit(7)


def prints(q, k, v, **options):
    print("a line of its own")
    return right(q, k, v, **options)


def lacks_the_window(q, k, v, *, causal=False, return_lse=False):
    return flash_attention(q, k, v, causal=causal)


def fails_from_17_tokens_on(q, k, v, *, return_lse=False, **options):
    o, lse = flash_attention(q, k, v, **options)
    return (o, lse) if q.shape[-3] < 17 else (torch.cat([o[..., :16, :, :], 0 * o[..., 16:, :, :]], -3), lse)


def takes_too_many(q, k, v, mask, *, return_lse=False, causal=False):
    return flash_attention(q, k, v, causal=causal)


not_a_function = 3
