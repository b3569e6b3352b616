"""The graph: what is recorded, in which order it is walked, that gradients share no memory with anything else,
and what is freed.
"""

import gc
import itertools
import weakref

import numpy as np
import pytest
from against_torch import compare, each_backend, normal, on

import mytorch
from mytorch import Device, Function, Tensor, backends, gradcheck, no_grad
from mytorch.autograd import gives_new_memory


@pytest.fixture(autouse=True)
def serial():
    with on("serial"):
        yield


def leaf(*numbers):
    return Tensor.create(list(numbers), requires_grad=True)


def test_a_tensor_used_many_times_adds_up():
    x = leaf(1.0, -2.0)
    (x + x).backward(Tensor.create([1.0, 10.0]))
    assert x.grad.numpy().tolist() == [2.0, 20.0]
    y = x * x
    (y * y + y * x + x).sum().backward()
    assert x.grad.numpy().tolist() == [2 + 4 + 3 + 1, 20 - 32 + 12 + 1]


def test_gradients_share_no_memory():
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    incoming = Tensor.ones((2,))
    (x + y).backward(incoming)
    pointers = {tensor.data_ptr() for tensor in (x.grad, y.grad, incoming)}
    assert len(pointers) == 3
    before = x.grad
    (x * 2).sum().backward()
    assert before.numpy().tolist() == [1.0, 1.0]
    assert x.grad.numpy().tolist() == [3.0, 3.0]


NUMBERS = [[1, 0, 3], [1, 1, 2]]
# Operations whose inputs are leaves, with the shapes of those: views of one gradient, the same gradient twice, new
# memory, and what was saved.
ON_LEAVES = {
    "add": (lambda x, y: x + y, (3, 4), (3, 4)),
    "add twice": (lambda x: x + x, (3, 4)),
    "add broadcast": (lambda x, y: x + y, (3, 4), (4,)),
    "sub": (lambda x, y: x - y, (3, 4), (3, 4)),
    "mul": (lambda x, y: x * y, (3, 4), (3, 4)),
    "mul twice": (lambda x: x * x, (3, 4)),
    "mul repeated": (lambda x, y: x * y, (3, 4), (1, 4)),
    "div": (lambda x, y: x / (y * y + 1), (3, 4), (3, 4)),
    "pow": (lambda x, y: (x * x + 1) ** y, (3, 4), (3, 4)),
    "unary": (lambda x, y, z: x.tanh() + y.exp() - z.relu(), (3, 4), (3, 4), (3, 4)),
    "neg": (lambda x: -x, (3, 4)),
    "where": (lambda x, y: (x > 0).where(x, y), (3, 4), (3, 4)),
    "dropout": (lambda x: x.dropout(0.5), (3, 4)),
    "cast": (lambda x: x.astype("float64").astype("float32"), (3, 4)),
    "sum": (lambda x: x.sum(0), (3, 4)),
    "sum of one": (lambda x: x.sum(1), (3, 1)),
    "mean": (lambda x: x.mean(1), (3, 4)),
    "mean of one": (lambda x: x.mean(1), (3, 1)),
    "max": (lambda x: x.max(1), (3, 4)),
    "reshape": (lambda x: x.reshape(2, 6), (3, 4)),
    "reshape to the same": (lambda x: x.reshape(3, 4), (3, 4)),
    "permute": (lambda x: x.T, (3, 4)),
    "permute a row": (lambda x: x.T, (1, 4)),
    "slice": (lambda x: x[1:, ::2], (3, 4)),
    "cat": (lambda x, y: mytorch.cat([x, y], axis=0), (3, 4), (2, 4)),
    "matmul": (lambda x, y: x @ y, (3, 4), (4, 5)),
    "matmul of transposed": (lambda x, y: x.T @ y.T, (3, 4), (5, 3)),
    "linear": (lambda x, w, b: x.linear(w, b), (2, 3, 4), (4, 5), (5,)),
    "softmax": (lambda x, y: x.softmax() + y.log_softmax(0), (3, 4), (3, 4)),
    "layer norm": (lambda x, w, b: x.layer_norm(w, b), (3, 4), (4,), (4,)),
    "convolution": (lambda x, w, b: x.conv2d(w, b, padding=1), (2, 2, 5, 6), (3, 2, 3, 2), (3,)),
    "pooling": (lambda x: x.max_pool2d(2, 1), (2, 2, 5, 6)),
    "gather": (lambda x: x.gather(0, Tensor.create(NUMBERS, device=x.device)), (4, 3)),
    "embedding": (lambda x: x.embedding(Tensor.create(NUMBERS, device=x.device)), (4, 3)),
    "attention": (lambda q, k, v: q.attention(k, v), (1, 5, 4, 4), (1, 6, 2, 4), (1, 6, 2, 4)),
    "reshape to a convolution": (lambda x, w: x.reshape(1, 1, 3, 4).conv2d(w), (3, 4), (1, 1, 2, 2)),
}


def memory(tensor):
    """The addresses of a tensor whose elements lie side by side."""
    lowest = tensor.data_ptr()
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.strides, strict=True))
    return range(lowest, lowest + (reach + 1) * tensor.dtype.itemsize)


def check_apart(tensors):
    places = sorted((memory(x) for x in tensors), key=lambda place: place.start)
    for before, after in itertools.pairwise(places):
        assert before.stop <= after.start, "two tensors share memory"


@each_backend
@pytest.mark.parametrize("name", ON_LEAVES)
def test_a_gradient_is_the_leafs_own(name, backend):
    function, *shapes = ON_LEAVES[name]
    with on(backend) as device:
        mytorch.manual_seed(0)
        leaves = [Tensor.randn(shape, requires_grad=True, device=device) for shape in shapes]
        y = function(*leaves)
        incoming = Tensor.randn(y.shape, device=device)
        # What the caller, and the graph until it is freed, have a hold of.
        kept = [incoming, y.detach(), *(x.detach() for x in leaves)]
        before = [x.numpy() for x in kept]
        y.backward(incoming)
        gradients = [x.grad for x in leaves]
        # A view shares its tensor's memory by right.
        check_apart([*gradients, incoming, *leaves])
        for x in gradients:
            assert x.strides == Tensor.zeros(x.shape).strides
        values = [x.numpy() for x in gradients]
        # A second gradient is added, and the first one written to, without a change to the others.
        function(*leaves).backward(incoming)
        check_apart([*gradients, *(x.grad for x in leaves), incoming, *leaves])
        for i, x in enumerate(gradients):
            np.testing.assert_array_equal(x.numpy(), values[i])
            backends.of(device).copy_(x._data, Tensor.zeros(x.shape, device=device)._data)
        if name != "dropout":
            for x, value in zip(leaves, values, strict=True):
                np.testing.assert_array_equal(x.grad.numpy(), value + value)
        for x, value in zip(kept, before, strict=True):
            np.testing.assert_array_equal(x.numpy(), value)


class Kept(Function):
    """Gives an array away that it has given before, and will again."""

    array = np.full(2, 3.0, np.float32)

    def _forward(self, x):
        return self.backend.copy(x)

    def _backward(self, grad):
        return self.array


def test_an_operation_may_keep_what_it_gives():
    x, y = leaf(1.0, 2.0), leaf(1.0, 2.0)
    Kept().apply(x).sum().backward()
    Kept().apply(y).sum().backward()
    x.grad.mutable_data_ptr()
    x.grad._data[:] = 0
    assert Kept.array.tolist() == y.grad.numpy().tolist() == [3.0, 3.0]


def test_new_memory_is_not_copied(monkeypatch):
    class Marked(Kept):
        @gives_new_memory
        def _backward(self, grad):
            return grad * 2

    class Unmarked(Marked):
        def _backward(self, grad):
            return grad

    copied = []
    backend = type(backends.of(Device.CPU))
    copy = backend.copy
    monkeypatch.setattr(backend, "copy", lambda self, x: copied.append(x) or copy(self, x))
    x, y = leaf(1.0, 2.0), leaf(3.0, 4.0)
    a, b, c = Marked().apply(x), Unmarked().apply(y), x * y
    copied.clear()
    a.sum().backward()
    assert copied == []
    b.sum().backward()
    assert len(copied) == 1
    x.set_grad(None)
    y.set_grad(None)
    c.sum().backward()
    assert len(copied) == 1


def test_a_leaf_itself():
    x = leaf(5.0)
    x.backward()
    assert x.grad.numpy().tolist() == [1.0]


def test_views_pass_gradients_back():
    x = Tensor.randn((2, 3), requires_grad=True)
    (x.T[1:].reshape(4)[::2] * Tensor.create([1.0, 10.0])).sum().backward()
    assert x.grad.numpy().tolist() == [[0, 1, 10], [0, 0, 0]]


def test_a_diamond_is_walked_once_for_each_node():
    """2 ** 60 paths lead through it."""
    x = leaf(1.0)
    y = x
    for _ in range(60):
        y = y * 0.5 + y * 0.5
    y.sum().backward()
    assert x.grad.numpy().tolist() == [1.0]


@pytest.mark.slow
def test_graphs_may_be_deep():
    x = leaf(1.0)
    y = x
    for _ in range(30000):
        y = y + 0.0
    y.sum().backward()
    assert x.grad.item() == 1.0
    y = x
    for _ in range(30000):
        y = y + 0.0
    # Without a backward, letting go of it must not recurse either.
    del y
    gc.collect()


def test_the_graph_is_freed():
    x = Tensor.randn((3,), requires_grad=True)
    y = x.exp()
    kept = weakref.ref(y)
    z = (y * y).sum()
    del y
    z.backward()
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        z.backward()


def test_a_shared_part_that_was_freed_is_an_error():
    x = leaf(2.0)
    y = x * x
    y.sum().backward()
    with pytest.raises(RuntimeError, match="freed by an earlier backward"):
        (y * 3).sum().backward()


def test_release_saved_inputs():
    x = leaf(2.0)
    y = x * x
    y._node.release_saved_inputs()
    with pytest.raises(RuntimeError, match="released"):
        _ = y._node.saved
    with pytest.raises(RuntimeError, match="freed"):
        y.backward()


def test_no_grad():
    x = leaf(1.0)
    with no_grad():
        y = x * 2
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="requires no gradient"):
        y.backward()

    @no_grad()
    def double(z):
        return z * 2

    assert not double(x).requires_grad
    assert (x * 2).requires_grad


def test_detach_and_what_needs_none():
    x, y = leaf(2.0), leaf(3.0)
    (x.detach() * y).sum().backward()
    assert x.grad is None
    assert y.grad.numpy().tolist() == [2.0]
    (x * Tensor.create([5.0])).sum().backward()
    assert x.grad.numpy().tolist() == [5.0]


def test_a_gradient_is_wanted_for_more_than_one_element():
    x = leaf(1.0, 2.0)
    with pytest.raises(ValueError, match="wants one element, and there are 2"):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r"expected a gradient of shape \[2\] on cpu, got \[3\]"):
        (x * 2).backward(Tensor.ones((3,)))


def test_what_was_changed_since_is_not_walked():
    w, x = leaf(2.0), Tensor.create([3.0])
    first, second = (w * x).sum(), (w * w).sum()
    first.backward()
    mytorch.optim.SGD([w], lr=1.0).step()
    with pytest.raises(RuntimeError, match="an input of Mul was changed after it ran"):
        second.backward()
    y = w * w
    w.mutable_data_ptr()
    with pytest.raises(RuntimeError, match="was changed after it ran"):
        y.backward()


def test_an_instance_is_applied_once():
    square = Square()
    square.apply(leaf(1.0))
    with pytest.raises(RuntimeError, match="this Square has been applied already"):
        square.apply(leaf(2.0))


class Square(Function):
    def _forward(self, x):
        self.save(x)
        return self.backend.binary("mul", x, x)

    def _backward(self, grad):
        (x,) = self.saved
        return self.backend.binary("mul", grad, self.backend.binary("add", x, x))


class WrongSquare(Square):
    def _backward(self, grad):
        (x,) = self.saved
        return self.backend.binary("mul", grad, x)


@each_backend
def test_an_operation_of_ones_own(backend):
    compare(backend, lambda x: Square().apply(x) * 3, lambda x: x * x * 3, normal(3, 4))


def test_gradcheck_tells_right_from_wrong():
    x = Tensor.randn((2, 3), requires_grad=True, dtype="float64")
    assert gradcheck(lambda x: Square().apply(x), [x])
    with pytest.raises(AssertionError, match=r"input 0 at \[0, 0\]: backward gives"):
        gradcheck(lambda x: WrongSquare().apply(x), [x])
    with pytest.raises(AssertionError, match="input 1"):
        gradcheck(lambda x, y: x * y.detach(), [x, Tensor.randn((3,), requires_grad=True, dtype="float64")])
    with pytest.raises(TypeError, match="float64, input 0 is float32"):
        gradcheck(lambda x: x, [leaf(1.0)])
    with pytest.raises(ValueError, match="at least one input"):
        gradcheck(lambda x: x, [x.detach()])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda self, grad: (grad, grad), "gave 2 gradients for 1 inputs"),
        (
            lambda self, grad: self.backend.full((7,), 1, mytorch.float32),
            r"gradient of shape \[7\] for an input of shape \[2\]",
        ),
    ],
)
def test_a_wrong_backward_is_named(given, message):
    broken = type("Broken", (Square,), {"_backward": given})
    with pytest.raises(RuntimeError, match=f"Broken._backward {message}|Broken._backward gave a {message}"):
        broken().apply(leaf(1.0, 2.0)).backward(Tensor.ones((2,)))


def test_what_is_not_implemented_is_named():
    with pytest.raises(NotImplementedError, match="Function must implement _forward"):
        Function().apply(leaf(1.0))
    with pytest.raises(TypeError, match="takes tensors, not float"):
        Square().apply(1.0)
    with pytest.raises(NotImplementedError, match="Compare must implement _backward"):
        Function._backward(mytorch.ops.elementwise.Compare("eq"), np.ones(1))


GRADCHECKED = {
    "elementwise": (
        lambda x, y: (x * y).tanh() + x.exp() / (y * y + 1) - x.gelu() * y.silu() + x.sigmoid(),
        (3, 4),
        (4,),
    ),
    "powers": (lambda x, y: (x * x + 0.5) ** y + (x * x + 1).sqrt() + (y * y + 1).log(), (3, 2), (3, 1)),
    "reductions": (lambda x, y: x.sum(1) * y.mean() + x.max(1), (3, 4), (3,)),
    "arrangement": (lambda x, y: mytorch.cat([x.T[1:], y.reshape(3, 2)], axis=1).permute(1, 0), (2, 4), (6,)),
    "matrices": (lambda x, y: (x @ y).relu() + x.linear(y), (2, 3), (3, 4)),
    "rows": (lambda x, y: x.softmax(0) + x.log_softmax() * y.layer_norm(y[0], y[1]), (3, 4), (3, 4)),
    "images": (lambda x, y: x.conv2d(y, stride=(1, 2), padding=1).max_pool2d(2, 1), (2, 2, 5, 6), (3, 2, 3, 2)),
    "attention": (lambda x, y: x.attention(y, y * 2, causal=True), (1, 5, 4, 3), (1, 6, 2, 3)),
}


@pytest.mark.parametrize("backend", ["serial", "parallel"])
@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck(name, backend):
    function, *shapes = GRADCHECKED[name]
    with on(backend):
        mytorch.manual_seed(0)
        assert gradcheck(function, [Tensor.randn(shape, requires_grad=True, dtype="float64") for shape in shapes])


def test_gradcheck_by_number():
    with on("serial"):
        x = Tensor.randn((4, 3), requires_grad=True, dtype="float64")
        places = Tensor.create([[1, 0, 3], [1, 1, 2]])
        assert gradcheck(lambda x: x.gather(0, places) + x.embedding(places).sum(2)[:, :3], [x])
        assert gradcheck(lambda x: (x > 0).where(x * x, x.exp()), [x])


class Double(Function):
    def _forward(self, x, *_):
        return self.backend.binary("add", x, x)


class LikeTorchs(Function):
    @staticmethod
    def forward(ctx, x):
        return x


def test_functions_written_as_torchs():
    x = Tensor.ones((2,))
    for inputs in ((x,), (x, x), (np.ones(2),)):
        with pytest.raises(TypeError, match=r"apply was called on a class.* Write MyFunction\(\)\.apply\(x\)"):
            Double.apply(*inputs)
    assert Double().apply(x).numpy().tolist() == [2, 2]
    with pytest.raises(NotImplementedError, match=r"LikeTorchs must implement _forward.*ctx.* _forward\(self, x\)"):
        LikeTorchs().apply(x)


@each_backend
def test_words_that_a_backend_does_not_know(backend):
    with on(backend) as device:
        found = backends.of(device)
        x = Tensor.ones((2,), device=device)._data
        with pytest.raises(ValueError, match=r"unary has no 'sqr': expected one of neg, exp, .*Did you mean 'sqrt'\?"):
            found.unary("sqr", x)
        with pytest.raises(ValueError, match=r"binary has no 'hypotenuse': expected one of add, .* Put together"):
            found.binary("hypotenuse", x, x)
        with pytest.raises(AttributeError, match=r"no method 'mul': it is called as binary\('mul', x, y\)"):
            found.mul(x, x)
        with pytest.raises(AttributeError, match=r"no method 'exp': it is called as unary\('exp', x\)"):
            found.exp(x)
        with pytest.raises(AttributeError, match=r"no method 'cumsum': mytorch\.backends\.base lists its methods"):
            found.cumsum(x)
