"""The parallel backend against the serial one: every loop, on small odd shapes that only reach it because the
thresholds are lowered here.
"""

import numba
import numpy as np
import pytest
from against_torch import normal, whole

import mytorch
from mytorch import Tensor
from mytorch.backends import parallel, serial
from mytorch.backends.base import UNARY
from mytorch.backends.loops import functions

TOLERANCE = {"float32": 3e-6, "float64": 1e-13}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
each_count = pytest.mark.parametrize(
    "threads", [1, pytest.param(2, marks=pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core"))]
)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    for threshold in ("CHEAP", "COSTLY", "PRODUCTS", "SHORT"):
        monkeypatch.setattr(parallel, threshold, 1)


@pytest.fixture(autouse=True)
def threads_as_before():
    before = mytorch.get_num_threads()
    yield
    mytorch.set_num_threads(before)


def close(found, expected, dtype):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    largest = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-6)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * largest)


def same(monkeypatch, name, dtype, *arguments, reaches_loop=True):
    """Results and arguments written to are those of the serial backend, which the parallel one must not have called."""

    def prepared():
        return [
            a.astype(dtype, order="K") if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in arguments
        ]

    def refuse(*_):
        raise AssertionError(f"{name} went to the serial backend")

    by_serial, by_threads = prepared(), prepared()
    expected = getattr(serial.SerialBackend(), name)(*by_serial)
    with monkeypatch.context() as patch:
        if reaches_loop:
            patch.setattr(serial.SerialBackend, name, refuse)
        found = getattr(parallel.ParallelBackend(), name)(*by_threads)
    if expected is not None:
        several = isinstance(expected, tuple)
        for x, y in zip(found, expected, strict=True) if several else [(found, expected)]:
            assert x.flags.c_contiguous
            close(x, y, dtype)
    for x, y in zip(by_threads, by_serial, strict=True):
        if isinstance(y, np.ndarray):
            close(x, y, dtype)


def turned(*shape, seed=0):
    """Not in C order."""
    return normal(*shape[::-1], seed=seed).T


@each_dtype
@each_count
def test_of_one(monkeypatch, dtype, threads):
    mytorch.set_num_threads(threads)
    x = np.concatenate(
        [4 * normal(73), 100 * normal(20), 1e-3 * normal(20), [0.0, np.nan, np.inf, -np.inf, 88.7, -103.0]]
    )
    for name in UNARY:
        given = abs(x) if name == "sqrt" else x
        same(monkeypatch, "unary", dtype, name, given, reaches_loop=name != "log")
        same(monkeypatch, "unary", dtype, name, abs(turned(5, 7)), reaches_loop=name != "log")


@each_dtype
def test_small_numbers_keep_their_digits(dtype):
    x = np.concatenate([10.0 ** -np.arange(1, 8), np.linspace(0.15, 0.3, 30)]).astype(dtype)
    for name in ("exp", "tanh", "sigmoid", "silu", "gelu"):
        found, expected = (backend.unary(name, x) for backend in (parallel.ParallelBackend(), serial.SerialBackend()))
        np.testing.assert_allclose(found, expected, rtol=4 * np.finfo(dtype).eps)


@each_dtype
@each_count
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_of_two(monkeypatch, dtype, threads, name):
    mytorch.set_num_threads(threads)
    shapes = [
        ((6, 7), (6, 7)),
        ((6, 7), ()),
        ((6, 7), (1, 1)),
        ((6, 7), (7,)),
        ((6, 7), (6, 1)),
        ((2, 3, 5), (3, 5)),
        ((2, 3, 5), (2, 1, 1)),
        ((1,), (1,)),
    ]
    for large, small in shapes:
        y = np.asarray(normal(*small, seed=1) + 3)
        same(monkeypatch, "binary", dtype, name, normal(*large), y)
        same(monkeypatch, "binary", dtype, name, y, normal(*large) + 3)
    same(monkeypatch, "binary", dtype, name, turned(6, 7), turned(6, 7, seed=1) + 3)
    for large, small in [((2, 3, 5), (3, 1)), ((4, 1), (1, 5)), ((0, 3), (3,))]:
        same(monkeypatch, "binary", dtype, name, normal(*large), normal(*small, seed=1) + 3, reaches_loop=False)
    odd = np.array([0.0, 1.0, -1.0, np.nan, np.inf, -np.inf])
    with np.errstate(all="ignore"):
        same(
            monkeypatch,
            "binary",
            dtype,
            name,
            *(np.ascontiguousarray(a) for a in np.broadcast_arrays(odd, odd[:, None])),
        )


@each_dtype
def test_gradients_of_one(monkeypatch, dtype):
    for name in ("sqrt_grad", "tanh_grad", "relu_grad", "gelu_grad", "silu_grad", "sigmoid_grad"):
        same(monkeypatch, "binary", dtype, name, normal(9, 11), abs(normal(9, 11, seed=1)) + 0.1)
        same(monkeypatch, "binary", dtype, name, np.broadcast_to(normal(11), (9, 11)), turned(9, 11) ** 2 + 0.1)
    same(monkeypatch, "binary", dtype, "relu_grad", normal(4), np.array([0.0, np.nan, 1.0, -1.0]))


@each_dtype
@each_count
def test_sum(monkeypatch, dtype, threads):
    mytorch.set_num_threads(threads)
    cases = [
        ((5, 7), (1,)),
        ((5, 7), (0,)),
        ((5, 7), (0, 1)),
        ((3, 4, 5), (0, 2)),
        ((3, 4, 5, 2), (0, 3)),
        ((37,), (0,)),
        ((3, 1100), (1,)),
        ((9, 2), (0,)),
    ]
    for shape, axes in cases:
        for keepdims in (False, True):
            same(monkeypatch, "sum", dtype, normal(*shape), axes, keepdims)
    same(monkeypatch, "sum", dtype, turned(5, 7), (0,), False)
    same(monkeypatch, "sum", dtype, normal(3, 4, 5), (1,), False, reaches_loop=False)
    same(monkeypatch, "sum", dtype, normal(3, 0), (0,), False, reaches_loop=False)


@each_dtype
def test_long_sums_keep_their_digits(dtype):
    x = np.random.default_rng(0).random(300_001).astype(dtype)
    found = parallel.ParallelBackend().sum(x, (0,), False)
    np.testing.assert_allclose(found, x.astype(np.float64).sum(), rtol=4 * np.finfo(dtype).eps)


@each_dtype
@each_count
def test_rows(monkeypatch, dtype, threads):
    mytorch.set_num_threads(threads)
    for shape in ((5, 7), (3, 2, 131), (1, 1)):
        x, y, grad = 3 * normal(*shape), abs(normal(*shape, seed=1)), normal(*shape, seed=2)
        for name in ("softmax", "log_softmax"):
            same(monkeypatch, name, dtype, 100 * x)
            same(monkeypatch, name, dtype, turned(*shape))
            same(monkeypatch, f"{name}_grad", dtype, grad, y)
    for shape in ((5, 7), (3, 2, 131), (1, 2)):
        x, grad = 3 * normal(*shape), normal(*shape, seed=2)
        weight, bias = normal(shape[-1]), normal(shape[-1], seed=3)
        same(monkeypatch, "layer_norm", dtype, x, weight, bias, 1e-3)
        same(monkeypatch, "layer_norm_grad", dtype, grad, x, weight, x.mean(-1), abs(x).mean(-1))
    for odd in ([0.0, np.nan, 1.0], [0.0, -np.inf, 1.0], [-np.inf] * 3, [np.inf, 0.0, 1.0]):
        with np.errstate(all="ignore"):
            same(monkeypatch, "softmax", dtype, np.array([odd, [1.0, 2.0, 3.0]]))
            same(monkeypatch, "log_softmax", dtype, np.array([odd, [1.0, 2.0, 3.0]]))


@each_dtype
def test_embedding_gradient(monkeypatch, dtype):
    same(monkeypatch, "take_grad", dtype, normal(50, 3), whole(50, below=7), 9)
    same(monkeypatch, "take_grad", dtype, normal(4, 5, 2, 3), whole(4, 5, below=2), 2)


@each_dtype
@each_count
@pytest.mark.parametrize(
    ("images", "weight", "stride", "padding"),
    [
        ((3, 2, 6, 7), (5, 2, 3, 2), (1, 1), (0, 0)),
        ((2, 3, 9, 8), (17, 3, 3, 3), (2, 3), (1, 2)),
        ((1, 1, 4, 4), (33, 1, 4, 4), (1, 1), (2, 3)),
        ((2, 1, 5, 5), (1, 1, 1, 1), (2, 2), (0, 0)),
        ((19, 18, 3, 3), (2, 18, 2, 2), (1, 1), (1, 1)),
    ],
)
def test_convolution(monkeypatch, dtype, threads, images, weight, stride, padding):
    mytorch.set_num_threads(threads)
    x, w, bias = normal(*images), normal(*weight), normal(weight[0])
    grad = serial.SerialBackend().conv2d(x, w, None, stride, padding)
    same(monkeypatch, "conv2d", dtype, x, w, bias, stride, padding)
    same(monkeypatch, "conv2d", dtype, turned(*images), turned(*weight), None, stride, padding)
    same(monkeypatch, "conv2d_grad_input", dtype, grad, w, images, stride, padding)
    same(monkeypatch, "conv2d_grad_weight", dtype, grad, x, weight, stride, padding)


def test_convolution_of_a_border_wider_than_the_window(monkeypatch):
    same(monkeypatch, "conv2d", "float32", normal(2, 1, 4, 4), normal(3, 1, 2, 2), None, (1, 1), (3, 3))
    same(
        monkeypatch,
        "conv2d_grad_input",
        "float32",
        normal(2, 3, 9, 9),
        normal(3, 1, 2, 2),
        (2, 1, 4, 4),
        (1, 1),
        (3, 3),
        reaches_loop=False,
    )


@each_dtype
@each_count
def test_pooling(monkeypatch, dtype, threads):
    mytorch.set_num_threads(threads)
    x = whole(3, 2, 7, 9, below=3).astype(float)
    x[0, 0, 0, :2], x[0, 1, 2, 3], x[1, 0] = np.nan, np.inf, -np.inf
    for size, stride in (((2, 2), (2, 2)), ((3, 2), (1, 2)), ((2, 2), (1, 3)), ((1, 4), (3, 1))):
        same(monkeypatch, "max_pool2d", dtype, x, size, stride)
        out, where = serial.SerialBackend().max_pool2d(x, size, stride)
        same(monkeypatch, "max_pool2d_grad", dtype, normal(*out.shape), where, x.shape, size, stride)


ATTENTION = [
    (5, 5, 2, 2, 4, 4),
    (70, 130, 4, 2, 9, 5),
    (130, 70, 2, 1, 8, 17),
    (1, 65, 3, 3, 1, 3),
    (33, 64, 1, 1, 16, 16),
    # Several tiles of keys in one chunk, and in each of several.
    (66, 200, 8, 8, 3, 3),
    (7, 500, 2, 2, 3, 3),
    # Four vectors of channels, which no panel of three divides.
    (33, 130, 2, 1, 64, 50),
]


@each_dtype
@each_count
@pytest.mark.parametrize("causal", [False, True])
def test_attention(monkeypatch, dtype, threads, causal):
    mytorch.set_num_threads(threads)
    for tq, tk, hq, hk, d, dv in ATTENTION:
        q, k, v, grad = (
            normal(2, tq, hq, d),
            turned(2, tk, hk, d, seed=1),
            normal(2, tk, hk, dv, seed=2),
            normal(2, tq, hq, dv, seed=3),
        )
        same(monkeypatch, "attention", dtype, q, k, v, causal, 0.4)
        output, lse = serial.SerialBackend().attention(q, k, v, causal, 0.4)
        same(monkeypatch, "attention_grad", dtype, grad, q, k, v, output, lse, causal, 0.4)


@each_dtype
def test_powers_of_two_of_all_sizes(dtype):
    """As softmax takes them: NaN stays, and what a number cannot hold with all its digits is 0 or infinite."""
    most = np.finfo(dtype).maxexp
    x = np.concatenate(
        [np.linspace(2 - most, most - 0.5, 1001), [np.nan, np.inf, -np.inf, most, 1e30, 1 - most, -1e30]]
    )
    x = x.astype(dtype)

    # NaN of other bits than NumPy's: all of them, and the last one too.
    bits = np.dtype(f"u{x.itemsize}")
    ones = ~bits.type(0)
    x = np.concatenate([x, np.array([ones, np.array(np.nan, dtype).view(bits) + bits.type(1)], bits).view(dtype)])

    @numba.njit(fastmath={"contract", "reassoc", "nsz"}, error_model="numpy")
    def run(x, out):
        for i in range(len(x)):
            out[i] = functions.exp2(x[i])

    found = np.empty_like(x)
    run(x, found)
    with np.errstate(over="ignore"):
        expected = np.where(x < 2 - most, 0, np.exp2(x.astype(np.longdouble)).astype(dtype))
    np.testing.assert_allclose(found, expected, rtol=2 * np.finfo(dtype).eps)


def test_attention_keeps_nan_to_its_rows(monkeypatch):
    q, k, v = normal(1, 40, 2, 4), normal(1, 70, 2, 4, seed=1), normal(1, 70, 2, 4, seed=2)
    q[0, 3, 0, 1], k[0, 60, 1, 0] = np.nan, 1e30
    same(monkeypatch, "attention", "float32", q, k, v, True, 0.5)


@pytest.mark.slow
@each_dtype
@each_count
def test_optimisers(monkeypatch, dtype, threads):
    mytorch.set_num_threads(threads)
    for decay in (0.0, 0.1):
        same(monkeypatch, "sgd_", dtype, normal(5, 7), turned(5, 7), None, 0.1, 0.0, decay)
        same(monkeypatch, "sgd_", dtype, normal(5, 7), normal(5, 7, seed=1), normal(5, 7, seed=2), 0.1, 0.9, decay)
        for decoupled in (False, True):
            moments = normal(5, 7, seed=2), abs(normal(5, 7, seed=3))
            same(
                monkeypatch,
                "adam_",
                dtype,
                normal(5, 7),
                turned(5, 7),
                *moments,
                3,
                0.1,
                (0.9, 0.99),
                1e-8,
                decay,
                decoupled,
            )
    same(monkeypatch, "sgd_", dtype, turned(5, 7), normal(5, 7), None, 0.1, 0.0, 0.0, reaches_loop=False)


def test_other_types_are_numpys(monkeypatch):
    backend = parallel.ParallelBackend()
    half, count = normal(4, 5).astype(np.float16), whole(4, 5, below=9)
    for x in (half, count):
        np.testing.assert_array_equal(backend.binary("add", x, x), x + x)
        np.testing.assert_array_equal(backend.sum(x, (0,), False), serial.SerialBackend().sum(x, (0,), False))
    assert backend.softmax(half).dtype == np.float16
    assert (
        backend.conv2d(
            normal(1, 1, 3, 3).astype(np.float16), normal(1, 1, 2, 2).astype(np.float16), None, (1, 1), (0, 0)
        ).dtype
        == np.float16
    )


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one core")
def test_results_do_not_depend_on_the_number_of_threads():
    backend = parallel.ParallelBackend()
    x, grad = normal(37, 3, 9, 9).astype(np.float32), normal(37, 5, 7, 7).astype(np.float32)
    # Of 500 keys several chunks.
    tokens = normal(1, 500, 2, 8).astype(np.float32)
    found = []
    for threads in (1, 2):
        mytorch.set_num_threads(threads)
        output, lse = backend.attention(tokens, tokens, tokens, True, 0.3)
        gradients = backend.attention_grad(tokens, tokens, tokens, tokens, output, lse, True, 0.3)
        sums = [backend.sum(x, axes, False) for axes in ((0, 1, 2, 3), (0, 2, 3), (0,))]
        found.append([output, *gradients, *sums, backend.conv2d_grad_weight(grad, x, (5, 3, 3, 3), (1, 1), (0, 0))])
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_number_of_threads():
    mytorch.set_num_threads(1)
    assert mytorch.get_num_threads() == 1
    for wrong in (0, -1, 10**6, 1.5, True, "2"):
        with pytest.raises(ValueError, match="number of threads"):
            mytorch.set_num_threads(wrong)


def test_a_step_of_training_reaches_the_same_place():
    """Through tensors, with the thresholds lowered: a small network on both backends."""
    found = []
    for backend in ("serial", "parallel"):
        before = mytorch.cpu_backend()
        mytorch.set_cpu_backend(backend)
        try:
            x, w, v = (
                Tensor.create(a.astype(np.float32), requires_grad=True)
                for a in (normal(3, 1, 6, 6), normal(4, 1, 3, 3), normal(16, 5))
            )
            loss = x.conv2d(w, padding=1).relu().max_pool2d(3).flatten(1).linear(v).log_softmax().mean()
            loss.backward()
            found.append([loss.numpy(), *(t.grad.numpy() for t in (x, w, v))])
        finally:
            mytorch.set_cpu_backend(before)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
