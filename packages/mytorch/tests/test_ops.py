"""Every operation against torch: result, type, shape, all gradients, on every backend, in every floating-point type."""

# Every lambda is called before its loop goes on.
# ruff: noqa: B023

import numpy as np
import pytest
import torch
from against_torch import compare, each_backend, each_dtype, normal, on, whole
from torch.nn import functional

import mytorch
from mytorch import Tensor

UNARY = {
    "neg": torch.neg,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
# Shapes that broadcast in every way that is treated by itself: equal, numbers, rows, columns, inner axes, both sides,
# empty, large.
PAIRS = [
    ((), ()),
    ((7,), ()),
    ((), (2, 3)),
    ((3, 5), (5,)),
    ((3, 5), (3, 1)),
    ((2, 3, 4), (3, 1)),
    ((2, 1, 4), (1, 3, 1)),
    ((0, 3), (1, 3)),
    ((90, 401), (401,)),
]
REDUCTIONS = [
    ((), None),
    ((5,), None),
    ((3, 4), 0),
    ((3, 4), -1),
    ((2, 3, 4), 1),
    ((2, 3, 4), (0, 2)),
    ((2, 3, 4), None),
    ((40, 701), 1),
    ((701, 40), 0),
]


@each_backend
@each_dtype
@pytest.mark.parametrize("name", UNARY)
def test_of_one(backend, dtype, name):
    for shape in ((), (7,), (3, 0), (4, 5, 6), (90, 401)):
        compare(backend, lambda x: getattr(x, name)(), UNARY[name], 2 * normal(*shape), dtype=dtype)


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["log", "sqrt"])
def test_of_one_positive(backend, dtype, name):
    for shape in ((7,), (90, 401)):
        compare(backend, lambda x: getattr(x, name)(), getattr(torch, name), abs(normal(*shape)) + 0.1, dtype=dtype)


@each_backend
@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid", "silu", "gelu", "relu"])
def test_far_from_zero(backend, name):
    compare(backend, lambda x: getattr(x, name)(), UNARY[name], 40 * normal(200))


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_of_two(backend, dtype, name):
    for left, right in PAIRS:
        y = normal(*right, seed=1)
        y = y + (1.5 * (y >= 0) - 1.5 * (y < 0) if name == "div" else 0)
        compare(backend, lambda x, y: getattr(x, name)(y), getattr(torch, name), normal(*left), y, dtype=dtype)


@each_backend
@each_dtype
def test_pow(backend, dtype):
    for left, right in PAIRS:
        compare(backend, lambda x, y: x**y, torch.pow, abs(normal(*left)) + 0.2, normal(*right, seed=1), dtype=dtype)
    for exponent in (0, 1, 2, 3, -1, 0.5):
        compare(backend, lambda x: x**exponent, lambda x: x**exponent, abs(normal(3, 4)) + 0.2, dtype=dtype)
    compare(backend, lambda x: x**3, lambda x: x**3, normal(3, 4), dtype=dtype)
    compare(backend, lambda x: 2**x, lambda x: 2**x, normal(3, 4), dtype=dtype)


@each_backend
def test_numbers_beside_tensors(backend):
    for operation in (
        lambda x: 2 - x,
        lambda x: 1 / (x * x + 1),
        lambda x: 3 * x + 1,
        lambda x: -x - 2.5,
        lambda x: x / 4,
    ):
        compare(backend, operation, operation, normal(3, 4))
    for operation in (lambda x: x + 1, lambda x: x * 0.5, lambda x: x / 2, lambda x: x == 3, lambda x: x < 2):
        compare(backend, operation, operation, whole(3, 4, below=5))


@each_backend
def test_types_combine(backend):
    compare(backend, lambda x, i: x * i, lambda x, i: x * i, normal(3, 4), whole(4, below=5))
    compare(backend, lambda i, b: i + b, lambda i, b: i + b, whole(3, 4, below=5), normal(4) > 0)
    half = lambda x: x.astype("float16").astype("float32") * x  # noqa: E731
    compare(backend, half, lambda x: x.half().float() * x, normal(3, 4))


@each_backend
@each_dtype
def test_where(backend, dtype):
    compare(
        backend,
        lambda x, y: (x > y).where(x, y),
        lambda x, y: torch.where(x > y, x, y),
        normal(3, 4),
        normal(4, seed=1),
        dtype=dtype,
    )


@each_backend
@each_dtype
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions(backend, dtype, keepdims):
    for shape, axis in REDUCTIONS:
        axes = tuple(range(len(shape))) if axis is None else axis
        if shape:
            compare(
                backend, lambda x: x.sum(axis, keepdims), lambda x: x.sum(axes, keepdims), normal(*shape), dtype=dtype
            )
            compare(
                backend, lambda x: x.mean(axis, keepdims), lambda x: x.mean(axes, keepdims), normal(*shape), dtype=dtype
            )
        compare(backend, lambda x: x.max(axis, keepdims), lambda x: x.amax(axes, keepdims), normal(*shape), dtype=dtype)
    tied = whole(4, 5, below=2).astype(float)
    compare(backend, lambda x: x.max(1, keepdims), lambda x: x.amax(1, keepdims), tied, dtype=dtype)
    compare(backend, lambda x: x.sum(0), lambda x: x.sum(0), normal(0, 3), dtype=dtype)


@each_backend
@each_dtype
def test_arrangement(backend, dtype):
    x = normal(2, 3, 4)
    both = [
        (lambda x: x.reshape(4, -1), lambda x: x.reshape(4, -1)),
        (lambda x: x.flatten(1), lambda x: x.flatten(1)),
        (lambda x: x.permute(2, 0, 1), lambda x: x.permute(2, 0, 1)),
        (lambda x: x.transpose(), lambda x: x.transpose(-2, -1)),
        (lambda x: x.transpose(0, 1).reshape(6, 4), lambda x: x.transpose(0, 1).reshape(6, 4)),
        (lambda x: x.T, lambda x: x.permute(2, 1, 0)),
        (lambda x: x[1], lambda x: x[1]),
        (lambda x: x[:, 1:, ::2], lambda x: x[:, 1:, ::2]),
        (lambda x: x[..., -1] * x[0, 0, 1], lambda x: x[..., -1] * x[0, 0, 1]),
        (lambda x: x.permute(1, 2, 0)[1:].exp(), lambda x: x.permute(1, 2, 0)[1:].exp()),
    ]
    for ours, theirs in both:
        compare(backend, ours, theirs, x, dtype=dtype)
    for axis in (0, 1, -1):
        parts = [normal(*(n + (i == axis % 3) * j for i, n in enumerate((2, 3, 4)))) for j in range(3)]
        compare(backend, lambda *xs: mytorch.cat(xs, axis), lambda *xs: torch.cat(xs, axis), *parts, dtype=dtype)


@each_backend
@each_dtype
def test_by_number(backend, dtype):
    compare(
        backend,
        lambda t, i: t.embedding(i),
        lambda t, i: functional.embedding(i, t),
        normal(10, 6),
        whole(3, 7, below=10),
        dtype=dtype,
    )
    compare(
        backend,
        lambda t, i: t.embedding(i),
        lambda t, i: functional.embedding(i, t),
        normal(2, 33),
        whole(501, below=2),
        dtype=dtype,
        scale=4,
    )
    for axis in (0, 1, 2):
        shape = [2, 3, 4]
        shape[axis] = 5
        places = whole(*shape, below=(2, 3, 4)[axis])
        compare(
            backend,
            lambda x, i: x.gather(axis, i),
            lambda x, i: x.gather(axis, i),
            normal(2, 3, 4),
            places,
            dtype=dtype,
        )


@each_backend
@each_dtype
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4,)),
        ((3, 4), (4,)),
        ((4,), (2, 4, 3)),
        ((0, 4), (4, 5)),
        ((70, 90), (90, 110)),
    ],
)
def test_matmul(backend, dtype, left, right):
    compare(backend, lambda x, y: x @ y, torch.matmul, normal(*left), normal(*right, seed=1), dtype=dtype, scale=2)


@each_backend
@each_dtype
def test_matmul_of_transposed(backend, dtype):
    compare(
        backend,
        lambda x, y: x.T @ y.transpose(),
        lambda x, y: x.T @ y.T,
        normal(33, 20),
        normal(50, 33),
        dtype=dtype,
        scale=2,
    )


@each_backend
@each_dtype
def test_linear(backend, dtype):
    for shape in ((5, 6), (6,), (2, 3, 6), (0, 6)):
        compare(
            backend,
            lambda x, w, b: x.linear(w, b),
            lambda x, w, b: x @ w + b,
            normal(*shape),
            normal(6, 7),
            normal(7),
            dtype=dtype,
        )
        compare(backend, lambda x, w: x.linear(w), lambda x, w: x @ w, normal(*shape), normal(6, 7), dtype=dtype)


@each_backend
@each_dtype
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(backend, dtype, name):
    for shape, axis in (((5,), 0), ((3, 7), -1), ((2, 5, 3), 1), ((0, 3), 1), ((30, 1500), 1), ((3, 1), 1)):
        compare(
            backend, lambda x: getattr(x, name)(axis), lambda x: getattr(x, name)(axis), 3 * normal(*shape), dtype=dtype
        )
    compare(backend, lambda x: getattr(x, name)(), lambda x: getattr(x, name)(-1), 1000 * normal(4, 9), dtype="float32")


@each_backend
@each_dtype
def test_layer_norm(backend, dtype):
    for shape in ((5, 8), (2, 3, 33), (70, 700)):
        arrays = normal(*shape) + 2, normal(shape[-1]), normal(shape[-1], seed=1)
        compare(
            backend,
            lambda x, w, b: x.layer_norm(w, b),
            lambda x, w, b: functional.layer_norm(x, w.shape, w, b),
            *arrays,
            dtype=dtype,
            scale=3,
        )


CONVOLUTIONS = [
    ((2, 3, 8, 9), (4, 3, 3, 3), 1, 0),
    ((2, 3, 8, 9), (4, 3, 3, 2), 2, 1),
    ((1, 1, 5, 5), (2, 1, 5, 5), 1, 2),
    ((2, 2, 7, 7), (3, 2, 1, 1), (3, 2), 0),
    ((3, 5, 6, 10), (7, 5, 2, 3), (1, 2), (2, 1)),
    ((3, 16, 9, 9), (20, 16, 5, 5), 1, 0),
]


@each_backend
@each_dtype
@pytest.mark.parametrize(("images", "weight", "stride", "padding"), CONVOLUTIONS)
def test_conv2d(backend, dtype, images, weight, stride, padding):
    def theirs(x, w, b=None):
        return functional.conv2d(x, w, b, stride, padding)

    def ours(x, w, b=None):
        return x.conv2d(w, b, stride, padding)

    arrays = normal(*images), normal(*weight), normal(weight[0])
    compare(backend, ours, theirs, *arrays, dtype=dtype, scale=4)
    compare(backend, ours, theirs, *arrays[:2], dtype=dtype, scale=4)


@each_backend
@each_dtype
@pytest.mark.parametrize(
    ("images", "size", "stride"),
    [
        ((2, 3, 8, 8), 2, None),
        ((2, 3, 9, 7), 2, None),
        ((1, 2, 7, 8), 3, 2),
        ((2, 1, 6, 6), (2, 3), (1, 2)),
        ((20, 8, 24, 24), 2, None),
    ],
)
def test_max_pool2d(backend, dtype, images, size, stride):
    compare(
        backend,
        lambda x: x.max_pool2d(size, stride),
        lambda x: functional.max_pool2d(x, size, stride),
        normal(*images),
        dtype=dtype,
    )
    tied = whole(*images, below=2).astype(float)
    compare(
        backend,
        lambda x: x.max_pool2d(size, stride),
        lambda x: functional.max_pool2d(x, size, stride),
        tied,
        dtype=dtype,
    )


def attend(q, k, v, causal):
    """torch's, on [B, T, H, D], causal aligned at the end; rows without keys are 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2]), -torch.inf
        )
    return (torch.nan_to_num(scores.softmax(-1), nan=0.0) @ v).transpose(1, 2)


@each_backend
@each_dtype
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tq", "tk", "hq", "hk", "d", "dv"),
    [(5, 5, 2, 2, 4, 4), (3, 7, 4, 2, 8, 5), (7, 3, 2, 1, 8, 8), (130, 130, 2, 2, 16, 16), (1, 300, 1, 1, 16, 16)],
)
def test_attention(backend, dtype, causal, tq, tk, hq, hk, d, dv):
    if backend == "cuda" and dtype == "float64":
        pytest.skip("the attention kernels take fp16 and fp32")
    arrays = normal(2, tq, hq, d), normal(2, tk, hk, d, seed=1), normal(2, tk, hk, dv, seed=2)
    compare(
        backend,
        lambda q, k, v: q.attention(k, v, causal),
        lambda q, k, v: attend(q, k, v, causal),
        *arrays,
        dtype=dtype,
        scale=4,
    )


@each_backend
def test_large_means_and_counts_in_fp16(backend):
    """Sums and counts outgrow fp16 where the mean does not."""
    compare(backend, lambda x: x.mean(), lambda x: x.mean(), np.full(100, 1000.0), dtype="float16")
    compare(backend, lambda x: x.mean(), lambda x: x.mean(), np.ones(70000), dtype="float16")
    compare(backend, lambda x: x.max(), lambda x: x.amax(), np.ones(70000), dtype="float16")


@each_backend
def test_rows_about_a_large_number(backend):
    """What rounding leaves of a row's mean or maximum must not reach the result."""
    compare(backend, lambda x: x.log_softmax(), lambda x: x.log_softmax(-1), np.round(normal(64, 512), 2) + 65536)
    compare(backend, lambda x: x.log_softmax(), lambda x: x.log_softmax(-1), np.full((4, 100), 1e38))
    weight, bias = np.ones(768), np.zeros(768)
    with on(backend) as device:
        x, w, b = (Tensor.create(a, dtype="float32", device=device) for a in (np.full((40, 768), 1000.1), weight, bias))
        assert abs(x.layer_norm(w, b).numpy()).max() < 1e-3


@each_backend
def test_nothing_in_some_axis(backend):
    compare(
        backend,
        lambda x, w, b: x.linear(w, b),
        lambda x, w, b: x @ w + b,
        np.zeros((5, 0)),
        np.zeros((0, 3)),
        normal(3),
    )
    compare(backend, lambda x: x.softmax(), lambda x: x.softmax(-1), np.zeros((3, 0)))
    compare(
        backend,
        lambda t, i: t.embedding(i),
        lambda t, i: functional.embedding(i, t[:, None])[..., 0],
        normal(4),
        np.array(1),
    )
    for tq, tk, batch in ((0, 3, 2), (3, 0, 2), (3, 3, 0)):
        arrays = normal(batch, tq, 2, 4), normal(batch, tk, 1, 4), normal(batch, tk, 1, 4)
        compare(backend, lambda q, k, v: q.attention(k, v), lambda q, k, v: attend(q, k, v, False), *arrays)


@each_backend
def test_powers_of_zero(backend):
    compare(backend, lambda x, y: x**y, torch.pow, np.zeros(4), np.array([0.0, 1.0, 2.0, -1.0]))


@each_backend
def test_dropout(backend):
    with on(backend) as device:
        x = Tensor.ones((200, 300), requires_grad=True, device=device)
        mytorch.manual_seed(3)
        first = x.dropout(0.25)
        mytorch.manual_seed(3)
        assert (first.numpy() == x.dropout(0.25).numpy()).all()
        assert (first.numpy() != x.dropout(0.25).numpy()).any()
        assert set(first.numpy().ravel().tolist()) == {0.0, float(np.float32(1 / 0.75))}
        assert abs((first.numpy() == 0).mean() - 0.25) < 0.01
        first.backward(Tensor.ones((200, 300), device=device))
        assert (x.grad.numpy() == first.numpy()).all()
        assert x.dropout(0.25, training=False) is x
        assert (x.dropout(1.0).numpy() == 0).all()
