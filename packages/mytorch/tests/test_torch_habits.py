"""What people write in torch means the same here: one spelling, run in both, result and all gradients."""

import numpy as np
import pytest
import torch
from against_torch import close, compare, each_backend, normal, whole
from torch.nn import functional

import mytorch
from mytorch import Device, Tensor, nn

TIED = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, -1.0, 0.0]])
BOUNDS = np.array([-1.0, 0.0, 0.5])
NAN = np.array([[1.0, np.nan, np.nan], [np.nan, 2.0, 5.0]])

# Each is called with the library, mytorch or torch, and its tensors: float arrays require gradients.
SPELLINGS = {
    "view": (lambda _, x: x.view(4, -1), normal(2, 3, 4)),
    "view, apart": (lambda _, x: x.transpose(0, 1).view(3, 2, 2, 2), normal(2, 3, 4)),
    "view, rows": (lambda _, x: x[:, 1:].view(2, 8), normal(2, 3, 4)),
    "view, empty": (lambda _, x: x.transpose(0, 1).view(0, 7), normal(2, 0)),
    "unsqueeze": (lambda _, x: x.unsqueeze(0) * x.unsqueeze(-1) + x.unsqueeze(dim=1), normal(3, 3)),
    "unsqueeze, no axes": (lambda _, x: x.unsqueeze(-1), normal()),
    "squeeze": (lambda _, x: x.squeeze(), normal(1, 3, 1, 2)),
    "squeeze, named": (lambda _, x: x.squeeze(-2).squeeze(dim=(0, 1)), normal(1, 3, 1, 2)),
    "squeeze, transposed": (lambda _, x: x.transpose(0, 2).squeeze(1), normal(4, 1, 3)),
    "split": (lambda m, x: parts(m, x.split(3)), normal(7, 2)),
    "split, listed": (lambda m, x: parts(m, x.split([1, 0, 4], dim=-1)), normal(2, 5)),
    "split, transposed": (lambda m, x: parts(m, x.transpose(0, 1).split(4, 0)), normal(2, 5)),
    "split, empty": (lambda m, x: parts(m, x.split(3)), normal(0, 2)),
    "chunk": (lambda m, x: parts(m, x.chunk(6)), normal(10, 2)),
    "chunk, along": (lambda m, x: parts(m, x.chunk(3, dim=-1)), normal(2, 7)),
    "chunk, empty": (lambda m, x: parts(m, x.chunk(3)), normal(0, 2)),
    "stack": (lambda m, x, y: m.stack([x, y, x]), normal(2, 3), normal(2, 3, seed=1)),
    "stack, last": (lambda m, x, y: m.stack((x.transpose(0, 1), y), dim=-1), normal(2, 3), normal(3, 2)),
    "stack, types": (lambda m, x, i: m.stack([x, i], 1), normal(3), whole(3, below=4)),
    "cat": (lambda m, x, y: m.cat([x, y], dim=-1), normal(2, 3), normal(2, 1)),
    "clamp": (lambda _, x: x.clamp(-0.5, 0.5), normal(3, 7)),
    "clamp, at the ends": (lambda _, x: x.clamp(min=0, max=2), TIED),
    "clamp, below": (lambda _, x: x.clamp(max=2.0), TIED),
    "clamp, crossing": (lambda _, x: x.clamp(3, 1), normal(5)),
    "clamp, tensors": (lambda _, x, a: x.clamp(a, a + 1), normal(4, 3), BOUNDS),
    "clamp, one tensor": (lambda _, x, a: x.clamp(max=a), normal(3), BOUNDS[:, None]),
    "clamp, tensors that meet": (
        lambda _, x, a, b: x.clamp(a, b),
        TIED,
        np.array([1.0, 2.0, 3.0]),
        np.full((3, 1), 2.0),
    ),
    "clamp, integers": (lambda _, i: i.clamp(1, 3), whole(3, 4, below=6)),
    "clamp, promoted": (lambda _, i: i.clamp(1.5), whole(3, 4, below=6)),
    "clamp, NaN": (lambda _, x: x.clamp(0, 3), NAN),
    "abs": (lambda _, x: x.abs() + abs(x.transpose(0, 1)), TIED - 1),
    "abs, integers": (lambda _, i: (i - 3).abs(), whole(3, 4, below=6)),
    "abs, empty": (lambda _, x: x.abs(), normal(0, 3)),
    "argmax": (lambda _, x: x.argmax(), normal(3, 7)),
    "argmax, kept": (lambda _, x: x.argmax(keepdim=True), normal(3, 7)),
    "argmax, first": (lambda _, x: x.argmax(dim=-1), TIED),
    "argmax, columns": (lambda _, x: x.transpose(0, 1).argmax(0, keepdim=True), TIED),
    "argmax, middle": (lambda _, i: i.argmax(1), whole(2, 5, 3, below=3)),
    "argmax, NaN": (lambda _, x: x.argmax(1), NAN),
    "argmax, infinite": (lambda _, x: x.argmax(1), np.full((2, 3), -np.inf)),
    "argmax, empty": (lambda _, x: x.argmax(1), normal(0, 3)),
    "var": (lambda _, x: x.var(), normal(3, 7)),
    "var, axes": (lambda _, x: x.var((0, -1), keepdim=True), normal(3, 5, 2)),
    "var, population": (lambda _, x: x.transpose(0, 1).var(dim=0, correction=0), normal(3, 7)),
    "var, of one": (lambda _, x: x.var(1), normal(3, 1)),
    "var, of nothing": (lambda _, x: x.var(0), normal(0, 3)),
    "std": (lambda _, x: x.std(), normal(3, 7)),
    "std, axis": (lambda _, x: x.std(-1, correction=2, keepdim=True), normal(2, 3, 7)),
    "std, of equals": (lambda _, x: x.std(1), TIED),
    "std, of one": (lambda _, x: x.std(1), normal(3, 1)),
    "clone": (lambda _, x: x.clone() * x.transpose(0, 1).clone(), normal(3, 3)),
    "masked_fill": (lambda _, x, mask: x.masked_fill(mask, -2.5), normal(3, 4), normal(3, 4) > 0),
    "masked_fill, spread": (lambda _, x, mask: x.masked_fill(mask, 1), normal(2, 3, 1), normal(3, 4) > 0),
    "masked_fill, infinite": (lambda _, x: x.masked_fill(x > 0, -float("inf")).softmax(-1), normal(3, 9)),
    "masked_fill, tensor": (lambda _, x, v: x.masked_fill(x < 0, v), normal(3, 4), normal()),
    "masked_fill, integers": (lambda _, i: i.masked_fill(i == 2, 7.5), whole(3, 4, below=4)),
    "new axes": (lambda _, x: x[..., None] * x[None, :, None] + x[:, None], normal(3, 2, 2)),
    "new axes, among others": (lambda _, x: x[1:, None, ..., 0, None], normal(3, 2, 4)),
    "new axes, no axes": (lambda _, x: x[None, ..., None], normal()),
    "new axes, all integers": (lambda _, x: x[0, None, -1], normal(3, 2)),
    "dim": (lambda _, x: x.sum(dim=-1, keepdim=True) + x.mean(dim=(0, 2), keepdim=True), normal(2, 3, 4)),
    "dim of rows": (lambda _, x: x.softmax(dim=0) + x.log_softmax(dim=1), normal(3, 4)),
    "dim of gather": (lambda _, x, i: x.gather(dim=1, index=i), normal(3, 4), whole(3, 2, below=4)),
}
EQUATIONS = {
    "ij,jk->ik": [(3, 4), (4, 5)],
    "ij,jk": [(3, 4), (4, 5)],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "bqhd, bkhd -> bhqk": [(2, 4, 3, 5), (2, 6, 3, 5)],
    "i,j->ij": [(3,), (4,)],
    "i,i": [(5,), (5,)],
    "ij,ij->ij": [(3, 4), (3, 4)],
    "ij->ji": [(3, 4)],
    "ij->": [(3, 4)],
    "ii": [(4, 4)],
    "iji->ij": [(3, 2, 3)],
    "...ij,...jk->...ik": [(2, 1, 3, 4), (5, 4, 2)],
    "...i,i->": [(2, 3), (3,)],
    "i...,i...": [(3, 2), (3, 4, 2)],
    "ba,b": [(3, 4), (3,)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 2)],
    "bi,oij,bj->bo": [(3, 4), (2, 4, 5), (3, 5)],
    "ij,jk->k": [(1, 3), (1, 2)],
    "ij,k->kj": [(3, 4), (2,)],
    "aB,Bc->ac": [(2, 3), (3, 0)],
    ",i->i": [(), (3,)],
}


def parts(library, found):
    """All parts in one tensor, each with a factor of its own, behind their lengths: their number and order count."""
    assert isinstance(found, tuple)
    lengths = library.tensor([[n for part in found for n in part.shape]], dtype=found[0].dtype)
    if isinstance(found[0], Tensor):
        lengths = lengths.to(found[0].device)
    return library.cat([lengths, *(part.reshape(1, -1) * (i + 2) for i, part in enumerate(found))], 1)


def same(backend, spelling, *arrays, **options):
    compare(backend, lambda *xs: spelling(mytorch, *xs), lambda *xs: spelling(torch, *xs), *arrays, **options)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@each_backend
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_of_torch(backend, name):
    same(backend, *SPELLINGS[name], scale=4)


@each_backend
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(backend, equation):
    arrays = [normal(*shape, seed=i) for i, shape in enumerate(EQUATIONS[equation])]
    same(backend, lambda m, *xs: m.einsum(equation, *xs), *arrays, scale=4)


def test_einsum_of_transposed_tensors_in_a_list():
    same("serial", lambda m, x, y: m.einsum("ij,kj->ik", [x.transpose(0, 1), y[:, ::2]]), normal(3, 4), normal(5, 6))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", ["clamp", "abs", "var", "var, axes", "std", "std, of equals", "masked_fill", "clone"])
def test_other_types(name, dtype):
    spelling, *arrays = SPELLINGS[name]
    same("serial", spelling, *arrays, dtype=dtype, scale=2)


@pytest.mark.parametrize("name", ["clamp", "abs", "std, axis", "argmax, first"])
def test_large_arrays_on_threads(name):
    same("parallel", SPELLINGS[name][0], normal(400, 400), scale=20)


def test_the_variance_of_numbers_far_from_zero():
    """What rounding leaves of their mean reaches neither it nor its gradient: torch in fp64 says so."""
    numbers = (normal(5, 9) + 4096).astype("float32")
    x, expected = mytorch.tensor(numbers, requires_grad=True), torch.tensor(numbers.astype(float), requires_grad=True)
    for found in (x, expected):
        found.var(1).sum().backward()
    close(x.var(1), expected.var(1).float(), "variance", 10)
    close(x.grad, expected.grad.float(), "gradient", 10)


def test_squares_outgrow_fp16():
    same("serial", lambda _, x: x.std(), 400 * normal(70), dtype="float16")


@each_backend
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_binary_cross_entropy(backend, dtype):
    p, target = 1 / (1 + np.exp(-3 * normal(5, 7))), whole(5, 7, below=2).astype(float)
    compare(backend, nn.BCELoss(), functional.binary_cross_entropy, p, 0.8 * target + 0.1, dtype=dtype, scale=2)


@each_backend
def test_binary_cross_entropy_at_0_and_1(backend):
    """As torch: the loss is finite, and so is the gradient by the probability."""
    p, target = np.array([0.0, 1.0, 0.0, 1.0, 0.3]), np.array([0, 1, 1, 0, 0])
    ours = lambda p: nn.BCELoss()(p, Tensor.create(target, device=p.device))  # noqa: E731
    compare(backend, ours, lambda p: functional.binary_cross_entropy(p, torch.tensor(target).float()), p)
    compare(backend, lambda x: nn.Sigmoid()(x), torch.sigmoid, 40 * normal(9))
    if backend == "parallel":
        many = [np.tile(x, 40_000) for x in (p, target.astype(float))]
        compare(backend, nn.BCELoss(), functional.binary_cross_entropy, *many, scale=4)


def test_pooling_with_size_and_stride_by_position():
    compare("serial", nn.MaxPool2D(3, 2), torch.nn.MaxPool2d(3, 2), normal(2, 1, 7, 8))
    assert repr(nn.MaxPool2D(2, 2)) == "MaxPool2D((2, 2))"


def test_numbers_from_tensors():
    assert float(Tensor.create([[2.5]])) == 2.5
    assert int(Tensor.create(3)) == 3
    assert isinstance(float(Tensor.create(3)), float)
    assert np.isclose(float(mytorch.tensor([1.0, 2.0], requires_grad=True).sum()), 3)


def test_tensor_copies_as_torchs_does():
    for given in ([[1.0, 2], [3, 4]], 5, [True, False], [], np.ones(2), np.float32(2.5)):
        close(mytorch.tensor(given), torch.tensor(given), repr(given))
    x = mytorch.tensor([1, 2], dtype="float64", device="cpu", requires_grad=True)
    assert (x.dtype, x.device, x.requires_grad) == (mytorch.float64, Device.CPU, True)
    y = mytorch.tensor(x)
    assert y.data_ptr() != x.data_ptr()
    assert not y.requires_grad


def test_a_clone_has_memory_of_its_own():
    x = Tensor.randn(3, 4)
    assert x.clone().data_ptr() != x.data_ptr()
    assert x.view(4, 3).data_ptr() == x.unsqueeze(1).data_ptr() == x[..., None].data_ptr() == x.data_ptr()
    assert x.transpose().clone().strides == (3, 1)


def test_shapes_number_by_number_or_as_one():
    for make in (Tensor.zeros, Tensor.ones, Tensor.randn):
        assert make(3, 4).shape == make((3, 4)).shape == make([3, 4]).shape == make(shape=(3, 4)).shape == (3, 4)
        assert make(5).shape == make(np.int64(5)).shape == (5,)
        assert make(()).shape == ()
        assert make(0, 2, dtype="float64").dtype == mytorch.float64
        assert make((2,), True).requires_grad
        assert make(2, requires_grad=True).requires_grad
        for wrong in ((2, True), (2, -1), ((2,), 3), (2.5,), (None,), ("ab",)):
            with pytest.raises(TypeError, match=rf"{make.__name__} takes a shape as {make.__name__}\(3, 4\) or"):
                make(*wrong)
    mytorch.manual_seed(3)
    first = Tensor.randn(2, 3).numpy()
    mytorch.manual_seed(3)
    assert (Tensor.randn((2, 3)).numpy() == first).all()


# Of x, ones [2, 3].
REFUSED = [
    (lambda x: x.sum(0, dim=1), TypeError, "axis and dim are two names of one argument, got axis=0 and dim=1"),
    (lambda x: x.var(0, keepdims=True, keepdim=False), TypeError, "got keepdims=True and keepdim=False: give one"),
    (lambda x: mytorch.cat([x], 0, dim=0), TypeError, "two names of one argument"),
    (lambda x: x.softmax(0, dim=0), TypeError, "two names of one argument"),
    (lambda x: x.gather(dim=1), TypeError, "gather wants an axis and a tensor of numbers"),
    (lambda x: x.transpose().view(6), ValueError, r"\[3, 2\] with strides \[1, 3\] cannot be viewed as \[6\] without"),
    (lambda x: x.view(4, -1), ValueError, "which do not make"),
    (lambda x: x.unsqueeze(3), IndexError, "a tensor of 2 axes at -3 to 2, not at 3"),
    (lambda x: x.unsqueeze(), IndexError, "not at None"),
    (lambda x: x.squeeze(2), IndexError, "axis 2 is not there"),
    (lambda x: x.split(0), ValueError, "parts of at least 1 of axis 0, which has 2, not of 0"),
    (lambda x: x.split([1, 1], dim=1), ValueError, r"add up to 3, the length of axis 1, got \[1, 1\], which make 2"),
    (lambda x: x.chunk(0), ValueError, "parts of at least 1, not 0"),
    (lambda x: mytorch.stack([]), ValueError, "at least one tensor"),
    (lambda x: mytorch.stack([x, x[0]]), ValueError, r"of one shape, got \[2, 3\], \[3\]: cat\(\) joins"),
    (lambda x: x.clamp(), TypeError, "a min, a max or both"),
    (lambda x: (x > 0).abs(), TypeError, "abs is not defined on bool"),
    (lambda x: x.astype("int64").var(), TypeError, "the variance of int64"),
    (lambda x: x.astype("int64").std(), TypeError, "the standard deviation of int64"),
    (lambda x: x[:0].argmax(0), ValueError, r"no largest of nothing: shape \[0, 3\] along axis 0"),
    (lambda x: x.argmax((0, 1)), TypeError, r"along one axis, or without one over all elements, not along \(0, 1\)"),
    (lambda x: x.astype("int64").masked_fill(x > 0, float("inf")), ValueError, "inf is beyond int64"),
    (lambda x: x.masked_fill(x, 0), TypeError, "a bool tensor as its mask, not float32"),
    (lambda x: x.masked_fill(x > 0, x), ValueError, r"a tensor without axes, not one of shape \[2, 3\]"),
    (lambda x: x.astype("float16").masked_fill(x > 0, -1e9), ValueError, "-1000000000.0 is beyond float16"),
    (lambda x: x[None, 0, 0, 0], IndexError, "3 indices for a tensor of 2 axes"),
    (lambda x: float(x), TypeError, r"float\(\) wants a tensor of one element, and there are 6 in shape \[2, 3\]"),
    (lambda x: mytorch.einsum("ij,jk->ik", x), ValueError, "names 2 tensors, and 1 came"),
    (lambda x: mytorch.einsum("ijk->k", x), ValueError, r"3 axes with 'ijk', and the tensor has 2: \[2, 3\]"),
    (lambda x: mytorch.einsum("ij->k", x), ValueError, "'k' in its result and in none of its tensors"),
    (lambda x: mytorch.einsum("ij->ii", x), ValueError, "an axis of its result twice"),
    (lambda x: mytorch.einsum("ii", x), ValueError, r"the diagonal of axes of one length for 'i', not of \[2, 3\]"),
    (lambda x: mytorch.einsum("ij,ji->", x, x), ValueError, "two lengths, 3 and 2|two lengths, 2 and 3"),
    (lambda x: mytorch.einsum("i1->i", x), ValueError, "expected letters, one an axis"),
    (lambda x: mytorch.einsum(x, [0, 1]), TypeError, "takes an equation such as 'ij,jk->ik' first, not Tensor"),
    (lambda x: nn.BCELoss()(x, x[0]), ValueError, "a target of their shape"),
    (lambda x: nn.BCELoss()(2 * x, x), ValueError, "from 0 to 1, got numbers from 2 to 2: put a Sigmoid"),
    (lambda x: nn.BCELoss()(x * float("nan"), x), ValueError, "from 0 to 1, got numbers from nan to nan"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message[:30] for *_, message in REFUSED])
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(Tensor.ones(2, 3))
