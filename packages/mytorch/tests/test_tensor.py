"""What a tensor is: factories, types, devices, memory, how it prints, and what it refuses."""

import subprocess
import sys

import numpy as np
import pytest
from against_torch import on

import mytorch
from mytorch import Device, Tensor, backends, data, nn


@pytest.fixture(autouse=True)
def serial():
    with on("serial"):
        yield


def test_factories():
    x = Tensor.create([1.5, 2, 3, 4, 5, 6], (2, 3), requires_grad=True)
    assert x.shape == (2, 3)
    assert x.size == 6
    assert x.strides == (3, 1)
    assert x.dtype == mytorch.float32
    assert x.device is Device.CPU
    assert x.requires_grad
    assert Tensor.create([[1, 2], [3, 4]]).dtype == mytorch.int64
    assert Tensor.create(2.5).shape == ()
    assert Tensor.create([True, False]).dtype == mytorch.bool_
    assert Tensor.create(np.arange(3, dtype=np.int32)).dtype == mytorch.int64
    assert Tensor.create([1, 2], dtype="float16").dtype == mytorch.float16
    assert Tensor.zeros((2, 0, 3)).size == 0
    assert Tensor.ones((2,), dtype=mytorch.float64).numpy().tolist() == [1, 1]
    assert Tensor.arange(4).numpy().tolist() == [0, 1, 2, 3]
    assert Tensor.arange(4).dtype == mytorch.int64
    assert Tensor.arange(1, 2, 0.25).numpy().tolist() == [1, 1.25, 1.5, 1.75]
    assert Tensor.arange(1, 2, 0.25).dtype == mytorch.float32
    assert Tensor.from_numpy(np.eye(2)).dtype == mytorch.float64
    with pytest.raises(TypeError, match=r"made by Tensor\.create"):
        Tensor([1.0])
    with pytest.raises(ValueError, match=r"6 numbers do not fill the shape \[2, 2\], which has 4"):
        Tensor.create(range(6), (2, 2))
    with pytest.raises(TypeError, match="dtype complex128 is not one of"):
        Tensor.create(np.ones(2, dtype=complex))
    with pytest.raises(TypeError, match="only floating-point tensors can require a gradient"):
        Tensor.create([1, 2], requires_grad=True)
    with pytest.raises(TypeError, match="takes a NumPy array, not list"):
        Tensor.from_numpy([1.0])


def test_the_seed_decides():
    mytorch.manual_seed(7)
    first = Tensor.randn((100,)).numpy()
    mytorch.manual_seed(7)
    assert (Tensor.randn((100,)).numpy() == first).all()
    assert (Tensor.randn((100,)).numpy() != first).any()


def test_data_is_copied_in_and_out():
    array = np.ones(3, dtype=np.float32)
    x = Tensor.from_numpy(array)
    array[0] = 5
    x.numpy()[1] = 6
    x.data_cpu()[2] = 7
    assert x.numpy().tolist() == [1, 1, 1]


def test_item():
    assert Tensor.create([[2.5]]).item() == 2.5
    assert Tensor.create(3).item() == 3
    assert Tensor.create([True]).item() is True
    with pytest.raises(ValueError, match=r"one element, and there are 2 in shape \[2\]"):
        Tensor.zeros((2,)).item()


def test_pointers():
    x = Tensor.zeros((2, 3))
    assert x.data_ptr() == x.mutable_data_ptr() == x.detach().data_ptr()
    assert x[1].data_ptr() == x.data_ptr() + 12
    y = Tensor.zeros((2, 3), requires_grad=True)
    y.mutable_data_ptr()
    with pytest.raises(ValueError, match="result of a recorded operation"):
        (y * 2).mutable_data_ptr()
    repeated = Tensor._wrap(np.broadcast_to(np.zeros(3, np.float32), (2, 3)), Device.CPU)
    with pytest.raises(ValueError, match="share memory"):
        repeated.mutable_data_ptr()


def test_set_grad():
    x = Tensor.zeros((2,), requires_grad=True)
    grad = Tensor.ones((2,))
    x.set_grad(grad)
    assert x.grad.numpy().tolist() == [1, 1]
    assert x.grad.data_ptr() != grad.data_ptr()
    x.set_grad(None)
    assert x.grad is None
    with pytest.raises(ValueError, match="in float32, got .* in int64"):
        x.set_grad(Tensor.ones((2,), dtype="int64"))
    with pytest.raises(ValueError, match=r"expected shape \[2\] on cpu in float32, got \[3\] on cpu"):
        x.set_grad(Tensor.ones((3,)))


@pytest.mark.gpu
def test_devices():
    with on("cuda"):
        x = Tensor.create([[1.0, 2.0]], requires_grad=True)
        assert x.to(Device.CPU) is x
        y = x.to(Device.CUDA)
        assert y.device is Device.CUDA
        assert y.shape == (1, 2)
        assert y.requires_grad
        assert y.to(Device.CPU).numpy().tolist() == [[1, 2]]
        assert "device=cuda" in repr(y)
        with pytest.raises(ValueError, match=r"Add needs tensors on one device, got \[1, 2\] on cpu, \[1, 2\] on cuda"):
            _ = x + y
        with pytest.raises(ValueError, match="on cpu in float32, got"):
            x.set_grad(y)
        with pytest.raises(ValueError, match="on cuda, got"):
            (y * 2).backward(x)


@pytest.mark.gpu
def test_devices_by_their_words():
    with on("cuda"):
        x = Tensor.ones((2,), device="cuda")
        assert x.device is Tensor.randn((2,), device="cuda").device is Tensor.create([1.0]).to("cuda").device
        assert x.device is Tensor.create([1], device="cuda").device is Device.CUDA
        assert x.to("cuda") is x
        assert nn.Linear(1, 1).to("cuda").weight.device is Device.CUDA
        (batch,) = data.DataLoader(data.ArrayDataset(np.ones(1)), device="cuda")
        assert batch[0].device is Device.CUDA


@pytest.mark.parametrize(
    "take",
    [
        lambda device: Tensor.zeros((2,), device=device),
        lambda device: Tensor.randn((2,), device=device),
        lambda device: Tensor.arange(2, device=device),
        lambda device: Tensor.from_numpy(np.ones(2), device=device),
        lambda device: Tensor.create([1.0], device=device),
        lambda device: Tensor.zeros((2,)).to(device),
        lambda device: nn.ReLU().to(device),
        lambda device: data.DataLoader(data.ArrayDataset(np.ones(1)), device=device),
        lambda device: backends.of(device),
    ],
)
def test_only_words_of_devices_are_taken(take):
    take("cpu")
    allowed = "Device.CPU or Device.CUDA, or one of the words 'cpu' and 'cuda', not "
    for wrong, error, hint in (
        ("gpu", ValueError, "'gpu': for a GPU say 'cuda'"),
        ("CUDA", ValueError, "'CUDA': did you mean 'cuda'?"),
        ("cuda:0", ValueError, "'cuda:0': say 'cuda', the current GPU; CUDA_VISIBLE_DEVICES"),
        ("float16", ValueError, "'float16': an element type is dtype="),
        (mytorch.float16, TypeError, "dtype('float16'): an element type is dtype="),
        (0, TypeError, "0 of type int"),
    ):
        with pytest.raises(error) as raised:
            take(wrong)
        assert allowed + hint in str(raised.value)


def test_truth_and_comparisons():
    a, b = Tensor.create([1, 2]), Tensor.create([1, 3])
    assert (a != b).numpy().tolist() == [False, True]
    assert (a <= b).numpy().tolist() == [True, True]
    assert (b >= 3).numpy().tolist() == [False, True]
    assert (Tensor.create([float("nan")]) <= 1).numpy().tolist() == [False]
    assert a != "a"
    assert bool(Tensor.create([[2.0]]))
    assert not Tensor.create(0)
    with pytest.raises(ValueError, match="2 elements are not true or false together"):
        bool(a == b)


def test_numbers_of_numpy():
    x = Tensor.create([1, 2])
    assert (x + np.float32(0.5)).numpy().tolist() == [1.5, 2.5]
    assert (np.float64(2) * x).numpy().tolist() == [2, 4]
    assert (x == np.float32(1)).numpy().tolist() == [True, False]
    with pytest.raises(TypeError, match="not with ndarray"):
        np.ones(2) * x


def test_rounding_happens_once():
    assert Tensor.create([0.1, 1e300], dtype="float64").numpy().tolist() == [0.1, 1e300]
    assert Tensor.create([16777217.0], dtype="int64").item() == 16777217


def test_iteration():
    assert [row.numpy().tolist() for row in Tensor.create([[1, 2], [3, 4]])] == [[1, 2], [3, 4]]
    with pytest.raises(TypeError, match="no length"):
        list(Tensor.create(1.0))


def test_repr():
    assert repr(Tensor.create([1.0, 2.5])) == "Tensor([1. , 2.5], shape=[2], dtype=float32)"
    x = Tensor.create([1.0], requires_grad=True)
    assert repr(x) == "Tensor([1.], shape=[1], dtype=float32, requires_grad=True)"
    assert repr(x * 2) == "Tensor([2.], shape=[1], dtype=float32, node=Mul)"
    assert len(repr(Tensor.zeros((1000, 1000)))) < 500


def test_len_and_keys():
    x, y = Tensor.zeros((3, 2)), Tensor.zeros((3, 2))
    assert len(x) == 3
    assert {x: 1}[x] == 1
    assert len({x, y}) == 2
    with pytest.raises(TypeError, match="no length"):
        len(Tensor.create(1.0))


# Of x, zeros [2, 3].
REFUSED = [
    (lambda x: x + Tensor.zeros((4,)), ValueError, r"shapes \[2, 3\] and \[4\] do not broadcast"),
    (lambda x: x + "a", TypeError, "not with str"),
    (lambda x: x.sum(2), IndexError, "axis 2 is not there"),
    (lambda x: x.sum((0, -2)), ValueError, "names an axis twice"),
    (lambda x: Tensor.arange(3).mean(), TypeError, "the mean of int64"),
    (lambda x: Tensor.zeros((0, 3)).max(0), ValueError, "no largest of nothing"),
    (lambda x: x.reshape(4, -1), ValueError, r"has 6 elements, which do not make \[4, -1\]"),
    (lambda x: x.reshape(-1, -1), ValueError, "-1 once"),
    (lambda x: x.permute(0), ValueError, "every axis once"),
    (lambda x: x[2], IndexError, "index 2 is outside axis 0, which has 2"),
    (lambda x: x[0, 0, 0], IndexError, "3 indices for a tensor of 2 axes"),
    (lambda x: x[::-1], ValueError, "slices step forward"),
    (lambda x: x[..., ...], IndexError, "one ellipsis"),
    (lambda x: x[[0, 1]], TypeError, "not by list"),
    (lambda x: mytorch.cat([]), ValueError, "at least one"),
    (lambda x: mytorch.cat([x, Tensor.zeros((2, 2))]), ValueError, "wants the other axes equal"),
    (lambda x: x.embedding(Tensor.create([2])), IndexError, "numbers from 2 to 2, and only 0 to 1"),
    (lambda x: x.embedding(Tensor.create([-1])), IndexError, "numbers from -1"),
    (lambda x: x.embedding(Tensor.create([1.0])), TypeError, "int64 numbers, not float32"),
    (lambda x: x.gather(1, Tensor.zeros((3, 1), dtype="int64")), ValueError, "gather along axis 1"),
    (lambda x: x @ x, ValueError, "3 columns meet 2 rows"),
    (lambda x: x @ Tensor.create(1.0), ValueError, "at least one axis"),
    (lambda x: x.linear(x), ValueError, r"weight \[K, N\]"),
    (
        lambda x: x.linear(Tensor.zeros((3, 2), dtype="float64")),
        TypeError,
        "one floating-point type, got float32, float64",
    ),
    (lambda x: x.layer_norm(x[0], x[:, 0]), ValueError, "layer_norm of"),
    (lambda x: x.conv2d(x), ValueError, r"images \[B, C, H, W\]"),
    (lambda x: Tensor.zeros((1, 1, 2, 2)).conv2d(Tensor.zeros((1, 1, 3, 3))), ValueError, "does not fit"),
    (
        lambda x: Tensor.zeros((1, 1, 2, 2)).conv2d(Tensor.zeros((1, 1, 1, 1)), stride=0),
        ValueError,
        "stride is one integer or two, of at least 1",
    ),
    (lambda x: Tensor.zeros((1, 1, 2, 2)).max_pool2d(3), ValueError, "no smaller than that"),
    (
        lambda x: Tensor.zeros((1, 2, 3, 4)).attention(*[Tensor.zeros((1, 2, 2, 4))] * 2),
        ValueError,
        "Hq a multiple of Hk",
    ),
    (lambda x: x.dropout(1.5), ValueError, "probability, not 1.5"),
    (lambda x: Tensor.create([True]).where(1, 2), TypeError, "wants a tensor among"),
    (lambda x: mytorch.set_cpu_backend("fast"), ValueError, "'serial' or 'parallel', not 'fast'"),
    (lambda x: mytorch.backends.load("tpu"), ValueError, "no backend 'tpu'"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor.zeros((2, 3)))


def test_import_needs_numpy_alone():
    code = "import sys, mytorch, mytorch.nn, mytorch.optim, mytorch.data; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mytorch.nn" in imported
    assert not {"torch", "triton", "numba", "tilewise"} & set(imported)
