"""Of Triton after 3.9, python/tutorials/gluon/04-tma.py: a kernel and its launcher, unchanged but for the device; see
LICENSE here.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon.language.nvidia.hopper import tma, mbarrier, fence_async_shared


@gluon.jit
def tma_message_passing_kernel(message_desc, ready, output, MESSAGE_SIZE: gl.constexpr):
    pid = gl.program_id(0)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offsets = gl.arange(0, MESSAGE_SIZE, layout)
    smem = gl.allocate_shared_memory(message_desc.dtype, message_desc.block_shape, message_desc.layout)

    if pid == 0:
        # CTA 0 sends a message by staging it in shared memory and then using
        # TMA to write it to HBM.
        smem.store(offsets + 1000)
        fence_async_shared()
        tma.async_store(message_desc, [0], smem)

        # Before signaling CTA 1, wait for the TMA write to become visible in HBM.
        tma.store_wait(pendings=0, read_only=False)
        gl.atomic_xchg(ready, 1, sem="release", scope="gpu")
    else:
        # CTA 1 waits until the TMA message has been published, then reads it
        # back through TMA.
        ready_value = 0
        while ready_value != 1:
            ready_value = gl.atomic_add(ready, 0, sem="acquire", scope="gpu")

        bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, message_desc.block_type.nbytes)
        tma.async_load(message_desc, [0], bar, smem)
        mbarrier.wait(bar, phase=0, deps=[smem])
        mbarrier.invalidate(bar)
        gl.store(output + offsets, smem.load(layout))


def tma_message_passing(MESSAGE_SIZE):
    message = torch.full((MESSAGE_SIZE, ), -1, dtype=torch.int32)
    ready = torch.zeros(1, dtype=torch.int32)
    output = torch.full((MESSAGE_SIZE, ), -1, dtype=torch.int32)

    block_shape = [MESSAGE_SIZE]
    layout = gl.NVMMASharedLayout.get_default_for(block_shape, gl.int32)
    message_desc = TensorDescriptor.from_tensor(message, block_shape, layout)
    tma_message_passing_kernel[(2, )](message_desc, ready, output, MESSAGE_SIZE, num_warps=1)
    return output
