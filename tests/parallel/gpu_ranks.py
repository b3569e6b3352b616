"""What ranks run where they share one GPU, through gloo: its collectives copy through the host, and so must what a ring
passes on, here.
"""

import contextlib

import torch.distributed as dist
from parallel import flash_ranks, nsa_ranks


class OnItsWay:
    """Tensors of a GPU that are received on the host."""

    def __init__(self, work, received):
        self.work, self.received = work, received

    def wait(self):
        for one in self.work:
            one.wait()
        for x, host in self.received:
            x.copy_(host)


@contextlib.contextmanager
def passing_through_the_host():
    before = dist.batch_isend_irecv

    def passed(operations):
        received, on_host = [], []
        for one in operations:
            host = one.tensor.cpu()
            on_host.append(dist.P2POp(one.op, host, one.peer, one.group))
            if one.op is dist.irecv:
                received.append((one.tensor, host))
        return [OnItsWay(before(on_host), received)]

    dist.batch_isend_irecv = passed
    try:
        yield
    finally:
        dist.batch_isend_irecv = before


def on_gpu(module, group, *arguments):
    """What `module.sharded` gives, of inputs on the GPU, on the CPU."""
    own = module.inputs
    module.inputs = lambda *given, **options: each(own(*given, **options), lambda x: x.to("cuda"))
    try:
        with passing_through_the_host():
            return each(module.sharded(group, *arguments), lambda x: x.cpu())
    finally:
        module.inputs = own


def each(x, function):
    """Of the tensors in a dictionary, list or tuple, or of one."""
    if isinstance(x, dict):
        return {name: each(one, function) for name, one in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(each(one, function) for one in x)
    return function(x)


def flash(group, *arguments):
    return on_gpu(flash_ranks, group, *arguments)


def nsa(group, *arguments):
    return on_gpu(nsa_ranks, group, *arguments)
