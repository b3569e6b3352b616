"""Gluon kernels of clusters: right ones, and with a statement left out or another in its place."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise._gluon.cluster import CLUSTER, CLUSTER_BARRIERS
from tilewise.ops._device.hopper.ring import thread_barrier, tma_load, tma_store

# Two CTAs along the rows of a product, or two by two.
SPLITS = {2: [[1, 0]], 4: [[1, 0], [0, 1]]}
# Some Tritons have no names for these.
CLUSTER_NAMES = {name: getattr(getattr(hopper, "cluster", None), name, CLUSTER[name]) for name in CLUSTER}
cluster_arrive, cluster_wait, cluster_barrier = (CLUSTER_NAMES[name] for name in ("arrive", "wait", "barrier"))
fence_init, allocate_mbarrier = (
    getattr(mbarrier, name, CLUSTER_BARRIERS[name]) for name in ("fence_init_release_cluster", "allocate_mbarrier")
)
K = gl.constexpr(64)


def descriptor(x, block, split):
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16, cga_layout=split)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def operands(a, b, c, ctas):
    """Descriptors of a @ b = c: rows of a and columns of b that CTAs share are the same in both."""
    split = SPLITS[ctas]
    (m, n), along = c.shape, [[basis[0], 0] for basis in split]
    across = [[0, basis[1]] for basis in split]
    return descriptor(a, [m, 64], along), descriptor(b, [64, n], across), descriptor(c, [m, n], split)


@gluon.jit
def begin(SYNCED: gl.constexpr):
    """What Triton 3.7 wants of kernels after mbarrier.init."""
    if SYNCED == "fence and relaxed barrier":
        fence_init()
        cluster_arrive(relaxed=True)
        cluster_wait()
    elif SYNCED == "relaxed barrier":
        cluster_barrier(relaxed=True)
    elif SYNCED == "barrier":
        gl.barrier(cluster=True)


@gluon.jit
def product_kernel(a, b, c, steps, SYNCED: gl.constexpr, BYTES: gl.constexpr, BETWEEN: gl.constexpr):
    """c = a @ b in one tile of the cluster, through one buffer, which TMA fills in multicast."""
    M: gl.constexpr = c.block_shape[0]
    N: gl.constexpr = c.block_shape[1]
    split: gl.constexpr = c.layout.cga_layout
    b_a = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    b_b = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    full = allocate_mbarrier()
    mbarrier.init(full, count=1)
    begin(SYNCED)
    acc = gl.zeros([M, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], split))
    for i in range(steps):
        mbarrier.expect(full, (a.nbytes_per_cta + b.nbytes_per_cta) * BYTES // 2)
        tma_load(a, [0, i * K], full, b_a, multicast=True)
        tma_load(b, [i * K, 0], full, b_b, multicast=True)
        mbarrier.wait(full, i & 1, deps=[b_a, b_b])
        acc = warpgroup_mma(b_a, b_b, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if BETWEEN == "cluster":
            gl.barrier(cluster=True)
        elif BETWEEN == "relaxed":
            cluster_barrier(relaxed=True)
        elif BETWEEN == "threads":
            thread_barrier()
    b_c = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout)
    b_c.store(acc.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    tma_store(c, [0, 0], b_c)
    tma.store_wait(0)


@gluon.jit
def fetch(a, tiles, full, empty, steps):
    for i in range(steps):
        stage = i % 2
        mbarrier.wait(empty.index(stage), (i // 2 & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta)
        tma_load(a, [i * K, 0], full.index(stage), tiles.index(stage), multicast=True)


@gluon.jit
def add_up(c, tiles, full, empty, steps, BARRIERS: gl.constexpr):
    same: gl.constexpr = [[0, 0]]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], same)
    acc = gl.zeros([K, K], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(full.index(i % 2), i // 2 & 1)
        acc += tiles.index(i % 2).load(layout).to(gl.float32)
        thread_barrier()
        mbarrier.arrive(empty.index(i % 2), count=1)
    if BARRIERS == "inside":
        gl.barrier(cluster=True)
    rows = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, layout)), 0)
    gl.store(c + rows * K + columns, acc)


@gluon.jit
def ring_kernel(a, c, steps, BARRIERS: gl.constexpr):
    """The sum of a's tiles, which both CTAs read: one warp fetches for both, when both have released a buffer."""
    tiles = gl.allocate_shared_memory(a.dtype, [2, K, K], a.layout)
    full = allocate_mbarrier(batch=2)
    empty = allocate_mbarrier(batch=2, two_ctas=BARRIERS != "own")
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.barrier(cluster=True)
    gl.warp_specialize(
        [(add_up, (c, tiles, full, empty, steps, BARRIERS)), (fetch, (a, tiles, full, empty, steps))], [1], [24]
    )
    gl.barrier(cluster=True)


@gluon.jit
def exchange_kernel(x, y, HOW: gl.constexpr):
    """y = x in reverse order of its halves, which two CTAs have, through shared or global memory."""
    halves: gl.constexpr = [[1]]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], halves)
    whole: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[0]])
    i = gl.arange(0, 256, layout)
    j = gl.arange(0, 256, whole)
    if HOW == "conversion":
        gl.store(y + (j + 128) % 256, gl.convert_layout(gl.load(x + i), whole))
    elif HOW == "sum":
        gl.store(y + i, gl.load(x + i) + gl.sum(gl.load(x + i), axis=0))
    elif HOW == "global" or HOW == "global, no barrier":
        gl.store(y + i, gl.load(x + i))
        if HOW == "global":
            gl.barrier(cluster=True)
        gl.store(y + 256 + (j + 128) % 256, gl.load(y + j))
    else:
        buffer = gl.allocate_shared_memory(
            gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], halves), gl.load(x + i)
        )
        if HOW == "shared, own threads meet":
            thread_barrier()
        else:
            gl.barrier(cluster=True)
        gl.store(y + (j + 128) % 256, buffer.load(whole))
        if HOW == "shared, changed early":
            buffer.store(i)
        if HOW != "shared, ends early":
            gl.barrier(cluster=True)


@gluon.jit
def atomics_kernel(x, y):
    """A number that all add to, and one that the cluster adds to once."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[1]])
    i = gl.arange(0, 256, layout)
    gl.atomic_add(x + i * 0, 1, sem="relaxed")
    gl.store(y, gl.atomic_add(x + 1, 1) + gl.num_ctas())


@gluon.jit
def odd_kernel(x, HOW: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], [[1]])
    if HOW == "layout":
        gl.store(x, gl.load(x + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))))
    elif HOW == "remote store":
        buffer = gl.allocate_shared_memory(gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], [[0]]))
        buffer.store(gl.arange(0, 256, layout))
    elif HOW == "arrives twice":
        cluster_arrive()
        cluster_arrive()
    elif HOW == "waits alone":
        cluster_wait()
    elif HOW == "slice":
        gl.allocate_shared_memory(gl.int32, [256], gl.SwizzledSharedLayout(1, 1, 1, [0], [[1]])).slice(0, 64)
    elif HOW == "memory":
        gl.allocate_shared_memory(gl.float32, [2, 256, 256], gl.SwizzledSharedLayout(1, 1, 1, [1, 0], [[1, 0]]))
