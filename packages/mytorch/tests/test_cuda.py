"""The CUDA backend against the serial one, where the operations' tests do not reach: strides, edges, types, long sums,
equal bits.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from against_torch import TOLERANCE, normal, whole

from mytorch import Device, Tensor, backends

pytestmark = pytest.mark.gpu
FLOATS = tuple(TOLERANCE)


@pytest.fixture(scope="module")
def cuda():
    return backends.load("cuda")


SERIAL = backends.load("serial")


def agree(found, expected, scale=1.0):
    """Arrays of the two backends, or tuples of them: equal in type and shape, in C order, and in value but for
    rounding.
    """
    if isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            agree(a, b, scale)
        return
    assert found.is_contiguous()
    got = backends.load("cuda").to_numpy(found)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(got, expected)
        return
    largest = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-6)
    np.testing.assert_allclose(got, expected, rtol=0, atol=scale * TOLERANCE[str(expected.dtype)] * largest)


def both(cuda, call, *arrays, scale=1.0):
    """`call(backend, arrays)` on both backends agrees; what is no array goes to both as it is."""
    with np.errstate(all="ignore"):
        expected = call(SERIAL, *arrays)
    agree(call(cuda, *(cuda.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arrays)), expected, scale)


def strided(backend, x):
    """Five axes of which no two lie one behind the other."""
    return backend.slice(backend.permute(x, (4, 1, 3, 0, 2)), (slice(None), slice(0, None, 2), slice(1, None)))


@pytest.mark.parametrize("dtype", [*FLOATS, "int64", "bool"])
def test_five_axes(cuda, dtype):
    x, y = (np.asarray(4 * normal(3, 4, 5, 3, 2, seed=i), dtype) for i in range(2))
    column = np.asarray(4 * normal(2, 1, seed=3), dtype)
    for name in ("add", "mul", "eq", "lt", "gt"):
        both(cuda, lambda b, x, y: b.binary(name, strided(b, x), strided(b, y)), x, y)  # noqa: B023
    both(cuda, lambda b, x, y: b.binary("add", strided(b, x), b.slice(y, (slice(0, 1),))), x, column)
    both(
        cuda, lambda b, x, y: b.where(b.binary("lt", strided(b, x), strided(b, y)), strided(b, x), strided(b, y)), x, y
    )
    both(cuda, lambda b, x: b.copy(strided(b, x)), x)
    both(cuda, lambda b, x: b.max(strided(b, x), (1, 3), False), x)
    both(cuda, lambda b, x: b.reshape(strided(b, x), (-1, 6)), x)
    if dtype != "bool":
        both(cuda, lambda b, x: b.unary("neg", strided(b, x)), x)
        both(cuda, lambda b, x: b.sum(strided(b, x), (0, 2, 4), True), x)


def test_more_axes_than_five(cuda):
    x = normal(2, 3, 2, 3, 2, 3, 2)
    both(cuda, lambda b, x: b.unary("tanh", b.permute(x, (6, 4, 2, 0, 5, 3, 1))), x)


def test_write_where_strides_say(cuda):
    def write(b, x, y):
        out = b.full((5, 8), 0, b.dtype(x))
        b.copy_(b.slice(b.permute(out, (1, 0)), (slice(1, None, 2), slice(0, 3))), b.permute(y, (1, 0)))
        return b.binary("add", out, x)

    both(cuda, write, normal(5, 8), normal(3, 4))
    key = (slice(1, None, 2), 2)
    both(cuda, lambda b, x: b.slice_grad(b.permute(x, (1, 0)), key, (5, 4, 3)), normal(3, 2))
    both(
        cuda,
        lambda b, x, y: b.cat([b.permute(x, (1, 0)), y, b.slice(y, (slice(0, 0),))], 0),
        normal(3, 2),
        normal(4, 3),
    )


@pytest.mark.parametrize("source", [*FLOATS, "int64", "bool"])
def test_casts(cuda, source):
    x = np.array([0, 1, -1, 2.5, -3.75, 1000, 0.1], source)
    for dtype in (*FLOATS, "int64", "bool"):
        both(cuda, lambda b, x: b.cast(x, np.dtype(dtype)), x)  # noqa: B023


def test_exact_values(cuda):
    for value, dtype in (
        (0.1, "float64"),
        (2**53 + 1, "int64"),
        (-1, "int64"),
        (0.1, "float16"),
        (-np.inf, "float32"),
        (True, "bool"),
        (1, "float64"),
    ):
        assert (cuda.to_numpy(cuda.full((3,), value, np.dtype(dtype))) == np.full(3, value, dtype)).all()
    mask = cuda.to_numpy(cuda.dropout_mask((1000,), 0.3, 5, np.dtype("float64")))
    assert set(mask.tolist()) == {0.0, 1 / 0.7}


def test_nothing(cuda):
    empty, rows = normal(0, 3), normal(4, 0)
    for name, x in (("exp", empty), ("relu", rows)):
        both(cuda, lambda b, x: b.unary(name, x), x)  # noqa: B023
    both(cuda, lambda b, x: b.sum(x, (0,), False), empty)
    both(cuda, lambda b, x: b.sum(x, (1,), False), rows)
    both(cuda, lambda b, x: b.copy(x), empty)
    both(cuda, lambda b, x: b.softmax(x), empty)
    both(cuda, lambda b, x, y: b.matmul(x, y), rows, normal(0, 5))
    both(cuda, lambda b, x, y: b.linear(x, y, None), empty, normal(3, 2))
    both(cuda, lambda b, x, w: b.layer_norm_grad(*(x, x), w, *(b.full((0,), 0, b.dtype(x)),) * 2), empty, normal(3))
    both(cuda, lambda b, x, i: b.take(x, i), normal(4, 3), np.zeros((0, 2), np.int64))
    both(cuda, lambda b, x, i: b.take_grad(x, i, 4), normal(0, 2, 3), np.zeros((0, 2), np.int64))
    both(cuda, lambda b, x, i: b.gather_grad(x, 0, i, (4, 3)), empty, np.zeros((0, 3), np.int64))
    images, weight = normal(0, 2, 5, 5), normal(3, 2, 2, 2)
    both(cuda, lambda b, x, w: b.conv2d(x, w, None, (1, 1), (0, 0)), images, weight)
    both(cuda, lambda b, x, g: b.conv2d_grad_weight(g, x, (3, 2, 2, 2), (1, 1), (0, 0)), images, normal(0, 3, 4, 4))


def test_no_axes(cuda):
    x = np.array(1.5, np.float32)
    both(cuda, lambda b, x: b.sum(x, (), False), x)
    both(cuda, lambda b, x: b.binary("add", x, x), x)
    both(cuda, lambda b, x: b.copy(x), x)
    both(cuda, lambda b, x: b.cast(x, np.dtype("int64")), x)


@pytest.mark.parametrize(
    ("shape", "axes"), [((70_001,), (0,)), ((3001, 5), (0,)), ((40, 30, 61), (0, 2)), ((2, 9001), (1,))]
)
def test_long_reductions(cuda, shape, axes):
    x = normal(*shape)
    both(cuda, lambda b, x: b.sum(x, axes, False), x.astype("float32"), scale=4)
    both(cuda, lambda b, x: b.sum(x, axes, True), whole(*shape, below=2**55))
    for dtype in FLOATS:
        both(cuda, lambda b, x: b.sum(x, axes, True, 37), x.astype(dtype), scale=4)
    both(cuda, lambda b, x: b.max(x, axes, False), x)
    x.ravel()[x.size // 3] = np.nan
    both(cuda, lambda b, x: b.max(x, axes, False), x)
    both(cuda, lambda b, x: b.max(x, axes, False), np.full(shape, -(2**63)))
    both(cuda, lambda b, x: b.max(x, axes, False), x > 5)


def test_reductions_of_repeated(cuda):
    both(cuda, lambda b, x: b.sum(b.broadcast_to(x, (7, 300, 4)), (0, 1), False), normal(1, 4))
    both(cuda, lambda b, x: b.max(b.broadcast_to(x, (7, 300, 4)), (2,), True), normal(300, 1))


SPECIAL = [0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -3.0, np.inf, -np.inf, np.nan, 1e10, 1e-10]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_values(cuda, dtype):
    x = np.array(SPECIAL, dtype)
    found = cuda.to_numpy(cuda.binary("pow", cuda.reshape(cuda.from_numpy(x), (-1, 1)), cuda.from_numpy(x)))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(found, np.power(x[:, None], x), rtol=1e-6 if dtype == "float32" else 1e-13)
    for name in ("div", "add", "lt", "eq", "relu_grad", "pow_exponent"):
        both(cuda, lambda b, x: b.binary(name, b.reshape(x, (-1, 1)), x), x)  # noqa: B023
    for name in ("exp", "log", "sqrt", "tanh", "relu", "sigmoid"):
        both(cuda, lambda b, x: b.unary(name, x), x)  # noqa: B023


def test_powers_of_integers(cuda):
    both(
        cuda, lambda b, x, y: b.binary("pow", b.reshape(x, (-1, 1)), y), np.arange(-5, 6), np.array([0, 1, 2, 3, 7, 26])
    )
    with pytest.raises(ValueError, match="power of -2"):
        cuda.binary("pow", cuda.from_numpy(np.arange(3)), cuda.from_numpy(np.array([1, -2, 5])))
    with pytest.raises(TypeError, match="not defined on bool"):
        cuda.binary("sub", *[cuda.from_numpy(np.array([True]))] * 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(cuda, dtype):
    x, y = normal(3, 1, 20, 40).astype(dtype), normal(2, 40, 17, seed=1).astype(dtype)
    # [3, 1, 40, 20] @ [20, 9], neither in C order.
    both(
        cuda, lambda b, x, y: b.matmul(b.permute(x, (0, 1, 3, 2)), b.permute(y, (1, 0))), x, normal(9, 20).astype(dtype)
    )
    both(cuda, lambda b, x, y: b.matmul(b.slice(x, (slice(None), slice(None), slice(0, None, 3))), y), x, y)
    # A sum so long that it is divided among programs.
    both(
        cuda,
        lambda b, x, y: b.matmul(x, b.permute(y, (1, 0))),
        normal(3, 2100).astype(dtype),
        normal(5, 2100).astype(dtype),
        scale=4,
    )


def test_products_of_integers(cuda):
    both(cuda, lambda b, x, y: b.matmul(x, y), whole(20, 40, below=2**40), whole(40, 33, below=100))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows(cuda, dtype):
    x = np.asarray(3 * normal(5, 3, 9), dtype)
    both(cuda, lambda b, x: b.softmax(b.permute(x, (1, 2, 0))), x)
    both(cuda, lambda b, g, x: b.softmax_grad(b.permute(g, (1, 2, 0)), b.copy(b.permute(x, (1, 2, 0)))), x[::-1], x)
    both(
        cuda,
        lambda b, x, w: b.layer_norm(b.permute(x, (1, 2, 0)), w, w, 1e-5),
        x,
        np.asarray(normal(5), dtype),
        scale=4,
    )
    # Longer than a tile.
    x = np.asarray(normal(2, 5001), dtype)
    both(cuda, lambda b, x: b.softmax(x), x)
    both(cuda, lambda b, x: b.log_softmax(x), x)
    both(cuda, lambda b, g, x: b.log_softmax_grad(g, b.log_softmax(x)), x[::-1], x, scale=4)
    mean, rstd = (
        np.asarray(v, np.float64 if dtype == "float64" else np.float32) for v in (normal(2), abs(normal(2, seed=1)))
    )
    both(cuda, lambda b, *arrays: b.layer_norm_grad(*arrays), x[::-1], x, x[0], mean, rstd, scale=4)


def test_rows_of_infinities(cuda):
    x = normal(5, 4100)
    x[0], x[1, 3], x[2, 4], x[3, :4098] = -np.inf, np.nan, np.inf, -np.inf
    both(cuda, lambda b, x: b.softmax(x), x)
    both(cuda, lambda b, x: b.log_softmax(x), x)


def test_gradient_of_many_rows_and_columns(cuda):
    # Rows enough for the columns' sums to be divided.
    x, mean, rstd = normal(700, 9), normal(700), abs(normal(700, seed=1))
    both(cuda, lambda b, *arrays: b.layer_norm_grad(*arrays), x[::-1], x, x[0], mean, rstd)


@pytest.mark.parametrize("dtype", FLOATS)
def test_by_number(cuda, dtype):
    table, index = np.asarray(normal(30, 2, 20), dtype), whole(4, 3, below=30)
    both(cuda, lambda b, t, i: b.take(b.permute(t, (0, 2, 1)), b.permute(i, (1, 0))), table, index)
    both(
        cuda,
        lambda b, g, i: b.take_grad(b.permute(g, (1, 0, 2)), b.permute(i, (1, 0)), 30),
        np.asarray(normal(4, 3, 40), dtype),
        index,
    )
    # Numbers enough to be divided.
    both(cuda, lambda b, g, i: b.take_grad(g, i, 3), np.asarray(normal(1200, 5), dtype), whole(1200, below=3), scale=4)
    # Shorter than x along other axes, longer along its own.
    x, index = np.asarray(normal(5, 4, 3), dtype), whole(2, 6, 3, below=4)
    both(cuda, lambda b, x, i: b.gather(b.permute(x, (0, 1, 2)), 1, i), x, index)
    both(
        cuda,
        lambda b, g, i: b.gather_grad(b.permute(g, (2, 0, 1)), 1, i, (5, 4, 3)),
        np.asarray(normal(6, 3, 2), dtype),
        index,
    )
    # As a mean's backward leaves it: one number, repeated; and numbers of other strides.
    repeated, turned = np.asarray(normal(1), dtype), np.ascontiguousarray(index.transpose(1, 2, 0))
    both(
        cuda,
        lambda b, g, i: b.gather_grad(b.broadcast_to(g, index.shape), 1, b.permute(i, (2, 0, 1)), (5, 4, 3)),
        repeated,
        turned,
        scale=4,
    )


def test_infinite_gradient_stays_in_its_row(cuda):
    grad = normal(6, 4)
    grad[2, 1], grad[3, 0] = np.inf, np.nan
    both(cuda, lambda b, g, i: b.take_grad(g, i, 5), grad, np.array([0, 1, 2, 3, 1, 0]))


def test_images_of_any_strides(cuda):
    x, weight, where = normal(2, 7, 6, 3), normal(3, 3, 4, 3), ((2, 1), (1, 2))
    turned = (0, 3, 1, 2)
    both(cuda, lambda b, x, w: b.conv2d(b.permute(x, turned), b.permute(w, (2, 1, 0, 3)), None, *where), x, weight)
    grad = normal(2, 4, 8, 4)
    both(
        cuda,
        lambda b, g, w: b.conv2d_grad_input(b.permute(g, turned), b.permute(w, (2, 1, 0, 3)), (2, 3, 7, 6), *where),
        grad,
        weight,
    )
    both(
        cuda,
        lambda b, g, x: b.conv2d_grad_weight(b.permute(g, turned), b.permute(x, turned), (4, 3, 3, 3), *where),
        grad,
        x,
    )
    both(cuda, lambda b, x: b.max_pool2d(b.permute(x, turned), (3, 2), (2, 1)), x)


def test_pooling_takes_the_first(cuda):
    x = whole(2, 2, 9, 8, below=3).astype("float32")
    x[0, 0, 3:5, 2:4] = np.nan
    both(cuda, lambda b, x: b.max_pool2d(x, (3, 3), (2, 2)), x)
    grad = normal(2, 2, 4, 3).astype("float32")
    both(
        cuda,
        lambda b, x, g: b.max_pool2d_grad(g, b.max_pool2d(x, (3, 3), (2, 2))[1], (2, 2, 9, 8), (3, 3), (2, 2)),
        x,
        grad,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turned", [False, True])
def test_optimisers(cuda, dtype, turned):
    arrays = [np.asarray(abs(normal(30, 41, seed=i)), dtype) for i in range(4)]

    def run(b, method, *options, count):
        mine = [b.permute(b.from_numpy(x), (1, 0)) if turned else b.from_numpy(x) for x in arrays]
        getattr(b, method)(*mine[:count], *options)
        return tuple(b.copy(x) for x in mine)

    steps = [
        ("sgd_", 2, (None, 0.1, 0.0, 0.01)),
        ("sgd_", 3, (0.1, 0.9, 0.0)),
        ("adam_", 4, (3, 0.01, (0.9, 0.99), 1e-8, 0.1, True)),
        ("adam_", 4, (1, 0.01, (0.9, 0.99), 1e-8, 0.1, False)),
    ]
    for method, count, options in steps:
        agree(run(cuda, method, *options, count=count), run(SERIAL, method, *options, count=count), scale=2)


def test_the_same_bits_twice(cuda):
    x, grad = (cuda.from_numpy(normal(600, 40, seed=i).astype("float32")) for i in range(2))
    index = cuda.from_numpy(whole(600, below=7))
    images, weight = (
        cuda.from_numpy(normal(9, 2, 8, 8).astype("float32")),
        cuda.from_numpy(normal(3, 2, 3, 3).astype("float32")),
    )
    y = cuda.conv2d(images, weight, None, (1, 1), (1, 1))
    pooled, place = cuda.max_pool2d(images, (3, 3), (1, 1))
    calls = [
        lambda: cuda.sum(x, (0,), False),
        lambda: cuda.sum(x, (0, 1), False),
        lambda: cuda.matmul(cuda.permute(x, (1, 0)), grad),
        lambda: cuda.take_grad(grad, index, 7),
        lambda: cuda.layer_norm_grad(grad, x, x[0], x[:, 0], x[:, 1])[1],
        lambda: cuda.conv2d_grad_weight(y, images, (3, 2, 3, 3), (1, 1), (1, 1)),
        lambda: cuda.max_pool2d_grad(pooled, place, (9, 2, 8, 8), (3, 3), (1, 1)),
        lambda: cuda.dropout_mask((500,), 0.5, 3, np.dtype("float32")),
    ]
    for call in calls:
        assert (cuda.to_numpy(call()) == cuda.to_numpy(call())).all()


def test_memory_is_its_own(cuda):
    x = normal(3, 4)
    array = cuda.from_numpy(x)
    given = cuda.to_numpy(array)
    given[:] = 0
    assert (cuda.to_numpy(array) == x).all()
    assert cuda.data_ptr(cuda.copy(array)) != cuda.data_ptr(array)
    assert cuda.data_ptr(cuda.reshape(array, (12,))) == cuda.data_ptr(array)
    assert cuda.cast(array, np.dtype("float64")) is array
    assert cuda.strides(cuda.permute(array, (1, 0))) == (1, 4)


def test_attention_refuses_fp64(cuda):
    x = cuda.from_numpy(normal(1, 3, 1, 16))
    with pytest.raises(TypeError, match="fp16 and fp32, not float64"):
        cuda.attention(x, x, x, False, 1.0)


def test_attention_of_any_strides(cuda):
    def attend(b, q, k, g):
        q, k, g = (b.permute(x, (0, 3, 1, 2)) for x in (q, k, g))
        o, lse = b.attention(q, k, k, True, 0.3)
        return (o, lse, *b.attention_grad(g, q, k, k, o, lse, True, 0.3))

    arrays = [normal(1, 2, 16, 5, seed=i).astype("float32") for i in range(3)]
    both(cuda, attend, *arrays, scale=8)


def test_devices_do_not_mix(cuda):
    with pytest.raises(ValueError, match=r"one device, got \[2\] on cpu, \[2\] on cuda"):
        Tensor.ones((2,)) + Tensor.ones((2,), device=Device.CUDA)


FIRST_TENSOR = "from mytorch import Device, Tensor\nTensor.ones((2,), device=Device.CUDA)"


def error_of(program):
    """What a process that compiles kernels says when it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "PYTHONPATH": ":".join(sys.path)
    }
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode != 0
    return result.stderr


@pytest.mark.slow
def test_without_gpu_and_interpreter():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    error = error_of(FIRST_TENSOR)
    assert "RuntimeError: Device.CUDA needs a GPU and torch sees none" in error
    assert "TRITON_INTERPRET=1" in error


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["tilewise", "torch", "triton", "tilewise.ops._host.launching"])
def test_without_what_only_cuda_needs(missing):
    """The CPU works without it; the last one is a tilewise of another version."""
    on_cpu = "from mytorch import Tensor; assert (Tensor.ones((2,)) + 1).numpy().tolist() == [2, 2]"
    error = error_of(f"import sys; sys.modules[{missing!r}] = None\n{on_cpu}\n{FIRST_TENSOR}")
    (said,) = [line for line in error.splitlines() if line.startswith("ImportError: Device.CUDA needs tilewise")]
    assert f"{missing} " in said
    assert "pip install . ./packages/mytorch" in said
    assert "use Device.CPU" in said


def test_a_number_that_names_nothing_gives_nan(cuda):
    table = Tensor.from_numpy(normal(4, 3).astype("float32"), device=Device.CUDA)
    numbers = Tensor.create([[0, -1, 3], [4, 2**40, 1]], device=Device.CUDA)
    rows = table.embedding(numbers).numpy()
    assert (np.isnan(rows).all(-1) == [[False, True, False], [True, True, False]]).all()
    assert (rows[0, 0] == table.numpy()[0]).all()
    found = table.gather(0, numbers).numpy()
    assert (np.isnan(found) == [[False, True, False], [True, True, False]]).all()
    with pytest.raises(IndexError, match="numbers from -1"):
        Tensor.arange(4, device=Device.CUDA).embedding(numbers)


def test_attention_has_a_widest_head(cuda):
    x = Tensor.zeros((1, 2, 1, 320), device=Device.CUDA)
    with pytest.raises(ValueError, match="at most 256 channels a head, not 320"):
        x.attention(x, x)
