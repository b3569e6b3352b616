"""Kernels of one use each of the language: functions of two numbers along an axis, tiles put together and taken apart.

Tiles are of 16 rows and 8 columns.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS, COLUMNS, COUNT = gl.constexpr(16), gl.constexpr(8), gl.constexpr(128)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PAIRS = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def tile_places():
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
    return rows[:, None] * COLUMNS + columns[None, :]


@gluon.jit
def larger(a, b):
    return gl.where(gl.abs(a) >= gl.abs(b), a, b)


@gluon.jit
def larger_place(a, i, b, j):
    """The larger number and its place, the first of equal ones."""
    first = a > b or (a == b and i < j)
    return gl.where(first, a, b), gl.where(first, i, j)


@gluon.jit
def then(a, b, c, d):
    """c · (a · x + b) + d, of factors and terms, in whole numbers."""
    return a * c, b * c + d


@gluon.jit
def collatz(x):
    # A condition in the kernel.
    if x % 2 == 0:  # noqa: SIM108
        y = x // 2
    else:
        y = 3 * x + 1
    return y


@gluon.jit
def combine_kernel(x, out, NAME: gl.constexpr):
    """Along an axis."""
    places = tile_places()
    v = gl.load(x + places)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE))
    if NAME == "reduce":
        gl.store(out + rows, gl.reduce(v, 1, larger))
    elif NAME == "reduce keep_dims":
        gl.store(out + places, v + gl.reduce(v, 0, larger, keep_dims=True))
    elif NAME == "reduce all":
        gl.store(out, gl.reduce(v, None, larger))
    elif NAME == "reduce two":
        index = gl.convert_layout(columns[None, :] + rows[:, None] * 0, TILE)
        best, place = gl.reduce((v % 4, index), 1, larger_place)
        gl.store(out + rows, best * 100 + place)
    elif NAME == "associative_scan":
        gl.store(out + places, gl.associative_scan(v, 1, larger))
    elif NAME == "associative_scan reverse":
        gl.store(out + places, gl.associative_scan(v, 0, larger, reverse=True))
    elif NAME == "associative_scan two":
        factor, term = gl.associative_scan((v % 3, v), 0, then)
        gl.store(out + places, factor * 7 + term)
    elif NAME == "cumsum":
        gl.store(out + places, tl.cumsum(v, 1))
    elif NAME == "cumprod":
        gl.store(out + places, tl.cumprod(v, 0, reverse=True))
    elif NAME == "xor_sum":
        gl.store(out + rows, gl.xor_sum(v, 1))
    elif NAME == "reduce_or":
        gl.store(out + columns, gl.reduce_or(v, 0))
    elif NAME == "methods":
        gl.store(out + rows, v.sum(1) + v.max(axis=1))
    else:
        gl.static_assert(NAME == "map_elementwise")
        gl.store(out + places, gl.map_elementwise(collatz, v))


@gluon.jit
def arrange_kernel(x, out, NAME: gl.constexpr):
    """What changes places."""
    i = gl.arange(0, COUNT, LINE)
    v = gl.load(x + i)
    places = tile_places()
    if NAME == "join, split":
        w = gl.join(v, v + 1000)
        left, right = gl.split(w)
        gl.store(out + i, gl.convert_layout(left - right, LINE))
    elif NAME == "join":
        w = gl.convert_layout(gl.join(v, v + 1000), TILE)
        rows = gl.arange(0, COUNT, gl.SliceLayout(1, TILE))
        columns = gl.arange(0, 2, gl.SliceLayout(0, TILE))
        gl.store(out + rows[:, None] + columns[None, :] * 0, w, mask=columns[None, :] == 1)
    elif NAME == "split":
        left, right = gl.split(gl.reshape(gl.convert_layout(v, PAIRS), [COUNT // 2, 2]))
        half = gl.arange(0, COUNT // 2, LINE)
        gl.store(out + half, gl.convert_layout(left, LINE))
        gl.store(out + COUNT // 2 + half, gl.convert_layout(right, LINE))
    elif NAME == "broadcast":
        a, b = gl.broadcast(
            gl.load(x + gl.arange(0, ROWS, gl.SliceLayout(1, TILE)))[:, None],
            gl.load(x + gl.arange(0, COLUMNS, gl.SliceLayout(0, TILE)))[None, :],
        )
        gl.store(out + places, a - b)
    elif NAME == "broadcast_to":
        a = gl.load(x + gl.arange(0, ROWS, gl.SliceLayout(1, TILE)))[:, None]
        gl.store(out + places, a.broadcast_to([ROWS, COLUMNS]))
    elif NAME == "trans":
        w = gl.convert_layout(tl.trans(gl.load(x + places)), TILE)
        rows = gl.arange(0, COLUMNS, gl.SliceLayout(1, TILE))
        columns = gl.arange(0, ROWS, gl.SliceLayout(0, TILE))
        gl.store(out + rows[:, None] * ROWS + columns[None, :], w)
    elif NAME == "ravel":
        gl.store(out + i, gl.convert_layout(gl.ravel(gl.load(x + places)), LINE))
    elif NAME == "gather":
        gl.store(out + i, gl.gather(v, (i * 37 + 5) % COUNT, 0))
    elif NAME == "gather axis":
        index = (gl.load(x + places) & 0xFF) % ROWS
        gl.store(out + places, gl.gather(gl.load(x + places), index, 0))
    elif NAME == "histogram":
        gl.store(out + i, gl.histogram((v & 0xFF) % 50, COUNT, layout=LINE))
    elif NAME == "histogram mask":
        gl.store(out + i, gl.histogram(v & 0x3F, COUNT, mask=i < 70, layout=LINE))
    elif NAME == "set_auto_layout":
        gl.store(out + i, v + gl.set_auto_layout(gl.arange(0, COUNT), LINE))
    else:
        gl.static_assert(NAME == "full_like")
        gl.store(out + places, gl.full_like(v, 9, shape=[ROWS, COLUMNS], layout=TILE))


@gluon.jit
def arithmetic_kernel(x, y, out, NAME: gl.constexpr):
    """Of two tiles of numbers."""
    i = gl.arange(0, COUNT, LINE)
    a, b = gl.load(x + i), gl.load(y + i)
    if NAME == "add":
        v = gl.add(a, b)
    elif NAME == "sub":
        v = gl.sub(a, b)
    elif NAME == "mul":
        v = gl.mul(a, b)
    elif NAME == "div_rn":
        v = gl.div_rn(a, b)
    else:
        gl.static_assert(NAME == "sqrt_rn")
        v = gl.sqrt_rn(gl.abs(a))
    gl.store(out + i, v)


@gluon.jit
def inspect_kernel(out, NAME: gl.constexpr):
    """What the compiler knows of layouts."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = gl.allocate_shared_memory(gl.int32, [ROWS, 32], shared)
    if NAME == "bank_conflicts":
        # By columns: of every row the same bank.
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, 4], [0, 1])
        distributed: gl.constexpr = gl.distributed_type(gl.int32, [ROWS, 32], layout)
        gl.store(out, gl.bank_conflicts(distributed, memory.type))
    else:
        gl.static_assert(NAME == "to_linear_layout")
        linear: gl.constexpr = gl.to_linear_layout(TILE, [ROWS, COLUMNS])
        gl.store(out + tile_places(), gl.full([ROWS, COLUMNS], 4, gl.int32, TILE))
        v = gl.full([ROWS, COLUMNS], 3, gl.int32, linear)
        gl.store(out + tile_places(), gl.convert_layout(v, TILE, assert_trivial=True))


@gluon.jit
def quotient(a, b):
    return a / b


@gluon.jit
def refused_kernel(x, HOW: gl.constexpr):
    """What the compiler or a GPU does not do."""
    i = gl.arange(0, COUNT, LINE)
    if HOW == "gather":
        v = gl.gather(i, i + 1, 0)
    elif HOW == "histogram":
        v = gl.histogram(i, 64, layout=LINE)
    elif HOW == "split":
        v, _ = gl.split(i)
    elif HOW == "layouts":
        v, _ = gl.reduce((i, gl.arange(0, COUNT, PAIRS)), 0, larger_place)
    elif HOW == "combines":
        v = gl.associative_scan(i, 0, quotient)
    elif HOW == "condition":
        v = i if i > 5 else i + 1
    elif HOW == "fp8":
        v = i.to(gl.float8e5) + 1
    elif HOW == "bits":
        v = i.to(gl.float16, bitcast=True)
    elif HOW == "indices":
        v, _ = gl.max(i, 0, return_indices=True)
    else:
        gl.static_assert(HOW == "layout")
        v = gl.set_auto_layout(i, PAIRS)
    gl.store(x + i, v)


@gluon.jit
def talks_kernel(x):
    for _ in range(3):
        gl.static_print("of", 4)
    gl.device_print("found:", gl.load(x))
