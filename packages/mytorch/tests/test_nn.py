"""Layers and losses against torch with the same weights, result and all gradients; and what every module can do."""

import numpy as np
import pytest
import torch
from against_torch import close, each_backend, normal, on, whole
from torch.nn import functional

import mytorch
from mytorch import Device, Tensor, nn

each_cpu = pytest.mark.parametrize("backend", ["serial", "parallel"])


def compare(backend, make, theirs, *arrays, scale=4.0):
    """A module of random parameters against a torch function of (inputs, parameters by name)."""
    with on(backend) as device:
        mytorch.manual_seed(0)
        module = make()
        # Zeros and ones would hide a mistake.
        module.load_state_dict(
            {name: normal(*x.shape, seed=i) for i, (name, x) in enumerate(module.named_parameters())}
        )
        module.to(device)
        right = {name: torch.tensor(x.numpy(), requires_grad=True) for name, x in module.named_parameters()}
        floats = [array.dtype.kind == "f" for array in arrays]
        mine = [
            Tensor.create(a, requires_grad=f, dtype="float32" if f else None, device=device)
            for a, f in zip(arrays, floats, strict=True)
        ]
        others = [
            torch.tensor(a.astype("float32") if f else a, requires_grad=f) for a, f in zip(arrays, floats, strict=True)
        ]
        found, expected = module(*mine), theirs(*others, right)
        close(found, expected, "result", scale)
        incoming = normal(*expected.shape, seed=9).astype("float32")
        found.backward(Tensor.create(incoming, device=device))
        expected.backward(torch.tensor(incoming))
        for i, (x, y, is_float) in enumerate(zip(mine, others, floats, strict=True)):
            if is_float:
                close(x.grad, y.grad, f"gradient of input {i}", scale)
        for name, x in module.named_parameters():
            if name.endswith("to_k.bias"):
                # It adds the same to all scores of a query, which softmax does not notice: the gradient is 0, but for
                # rounding.
                assert abs(x.grad.numpy()).max() < 1e-4 * right[name.replace("bias", "weight")].grad.abs().max()
            else:
                close(x.grad, right[name].grad, f"gradient of {name}", scale)


@each_backend
def test_linear(backend):
    compare(backend, lambda: nn.Linear(5, 7), lambda x, p: x @ p["weight"] + p["bias"], normal(2, 3, 5))
    compare(backend, lambda: nn.Linear(5, 7, bias=False), lambda x, p: x @ p["weight"], normal(4, 5))


@each_backend
def test_conv2d(backend):
    compare(
        backend,
        lambda: nn.Conv2D(2, 3, (3, 2), stride=2, padding=(1, 0)),
        lambda x, p: functional.conv2d(x, p["weight"], p["bias"], 2, (1, 0)),
        normal(2, 2, 7, 6),
    )
    compare(
        backend,
        lambda: nn.Conv2D(1, 2, 3, bias=False),
        lambda x, p: functional.conv2d(x, p["weight"]),
        normal(2, 1, 5, 5),
    )


@each_cpu
def test_layers_without_parameters(backend):
    compare(backend, lambda: nn.MaxPool2D(2), lambda x, p: functional.max_pool2d(x, 2), normal(2, 3, 6, 7))
    compare(
        backend,
        lambda: nn.MaxPool2D(3, stride=(1, 2)),
        lambda x, p: functional.max_pool2d(x, 3, (1, 2)),
        normal(2, 3, 6, 7),
    )
    compare(backend, nn.ReLU, lambda x, p: torch.relu(x), normal(3, 4))
    compare(backend, nn.GELU, lambda x, p: functional.gelu(x, approximate="tanh"), normal(3, 4))
    compare(backend, nn.SiLU, lambda x, p: functional.silu(x), normal(3, 4))
    compare(backend, nn.Flatten, lambda x, p: x.flatten(1), normal(3, 2, 4))


@each_cpu
def test_layer_norm(backend):
    compare(
        backend,
        lambda: nn.LayerNorm(6, eps=1e-3),
        lambda x, p: functional.layer_norm(x, (6,), p["weight"], p["bias"], 1e-3),
        normal(2, 3, 6),
    )


@each_cpu
def test_embedding(backend):
    compare(
        backend, lambda: nn.Embedding(9, 4), lambda i, p: functional.embedding(i, p["weight"]), whole(3, 5, below=9)
    )


def attend(p, x, context, heads, kv_heads, causal, under=""):
    """torch's attention from mytorch's parameters, whose names begin with `under`."""
    q, k, v = (
        (source @ p[f"{under}{name}.weight"] + p[f"{under}{name}.bias"]).unflatten(-1, (n, -1)).transpose(1, 2)
        for name, source, n in (("to_q", x, heads), ("to_k", context, kv_heads), ("to_v", context, kv_heads))
    )
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2).flatten(2) @ p[f"{under}to_out.weight"] + p[f"{under}to_out.bias"]


@each_backend
@pytest.mark.parametrize(("kv_heads", "causal"), [(None, False), (2, True), (1, False)])
def test_attention(backend, kv_heads, causal):
    def make():
        return nn.MultiHeadAttention(8, 4, kv_heads=kv_heads, causal=causal)

    compare(backend, make, lambda x, p: attend(p, x, x, 4, kv_heads or 4, causal), normal(2, 5, 8) / 4, scale=20)


@each_cpu
def test_attention_to_a_context(backend):
    def theirs(x, context, p):
        return attend(p, x, context, 2, 2, False)

    compare(
        backend, lambda: nn.MultiHeadAttention(6, 2), theirs, normal(2, 3, 6) / 4, normal(2, 5, 6, seed=1) / 4, scale=20
    )


@each_backend
def test_transformer_block(backend):
    def theirs(x, p):
        normed = functional.layer_norm(x, (8,), p["norm_attention.weight"], p["norm_attention.bias"])
        x = x + attend(p, normed, normed, 2, 1, True, "attention.")
        hidden = (
            functional.layer_norm(x, (8,), p["norm_mlp.weight"], p["norm_mlp.bias"]) @ p["mlp.0.weight"]
            + p["mlp.0.bias"]
        )
        return x + functional.gelu(hidden, approximate="tanh") @ p["mlp.2.weight"] + p["mlp.2.bias"]

    compare(
        backend,
        lambda: nn.TransformerBlock(8, 2, kv_heads=1, causal=True, hidden=12),
        theirs,
        normal(2, 5, 8),
        scale=20,
    )


@each_backend
def test_losses(backend):
    compare(backend, nn.MSELoss, lambda x, y, p: functional.mse_loss(x, y), normal(3, 4), normal(3, 4, seed=1))
    compare(
        backend,
        nn.CrossEntropyLoss,
        lambda x, i, p: functional.cross_entropy(x, i),
        5 * normal(6, 4),
        whole(6, below=4),
    )
    compare(
        backend,
        nn.CrossEntropyLoss,
        lambda x, i, p: functional.cross_entropy(x.flatten(0, 1), i.flatten()),
        normal(2, 3, 5),
        whole(2, 3, below=5),
    )
    compare(
        backend,
        nn.CrossEntropyLoss,
        lambda x, i, p: functional.cross_entropy(x, i),
        1e4 * normal(6, 4),
        whole(6, below=4),
    )


@each_cpu
def test_dropout(backend):
    with on(backend):
        layer, x = nn.Dropout(0.25), Tensor.ones((100, 100))
        dropped = layer(x).numpy()
        assert abs((dropped == 0).mean() - 0.25) < 0.03
        assert layer.eval()(x) is x
        assert (layer.train()(x).numpy() == 0).any()
        block = nn.TransformerBlock(8, 2, dropout=0.5)
        y = Tensor.randn((1, 3, 8))
        assert (block(y).numpy() != block(y).numpy()).any()
        block.eval()
        assert (block(y).numpy() == block(y).numpy()).all()


# What every module can do.


@pytest.fixture(autouse=True)
def serial():
    with on("serial"):
        yield


class Model(nn.Module):
    """Parameters everywhere they may be: direct, in a module, in a list and a dict, used twice; and state, a result and
    something private.
    """

    def __init__(self):
        self.scale = Tensor.ones((2,), requires_grad=True)
        self.blocks = [nn.Linear(2, 3), nn.Linear(3, 2, bias=False)]
        self.heads = {"a": nn.Linear(2, 1)}
        self.again = self.blocks[0]
        self.tied = self.scale
        self.count = Tensor.zeros((1,), dtype="int64")
        self.result = self.scale * 2
        self._private = Tensor.ones((5,), requires_grad=True)


NAMES = ["scale", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "heads.a.weight", "heads.a.bias"]


def test_parameters_are_found_in_order_and_once():
    model = Model()
    assert [name for name, _ in model.named_parameters()] == NAMES
    assert [x.shape for x in model.parameters()] == [(2,), (2, 3), (3,), (3, 2), (2, 1), (1,)]
    assert list(model.state_dict()) == [*NAMES, "count"]
    assert [name for name, _ in model.named_modules()] == ["", "blocks.0", "blocks.1", "heads.a"]


def test_repr_shows_the_tree():
    assert repr(
        nn.Sequential(
            nn.Conv2D(1, 2, 3, stride=2, padding=1, bias=False),
            nn.Sequential(nn.MaxPool2D(2), nn.Dropout(0.1)),
            Model(),
        )
    ) == (
        "Sequential(\n"
        "  0: Conv2D(1, 2, (3, 3), stride=(2, 2), padding=(1, 1), bias=False)\n"
        "  1: Sequential(\n"
        "    0: MaxPool2D((2, 2))\n"
        "    1: Dropout(0.1)\n"
        "  )\n"
        "  2: Model(\n"
        "    blocks.0: Linear(2, 3)\n"
        "    blocks.1: Linear(3, 2, bias=False)\n"
        "    heads.a: Linear(2, 1)\n"
        "    again: Linear(2, 3)\n"
        "  )\n"
        ")"
    )
    assert repr(nn.MultiHeadAttention(8, 4, kv_heads=2, causal=True)).startswith(
        "MultiHeadAttention(heads=4, kv_heads=2, causal=True\n  to_q: Linear"
    )
    assert repr(nn.LayerNorm(3)) == "LayerNorm(3)"
    assert repr(nn.Embedding(3, 4)) == "Embedding(3, 4)"


def test_initial_values():
    mytorch.manual_seed(0)
    linear, conv = nn.Linear(400, 300), nn.Conv2D(32, 64, (3, 5))
    assert abs(linear.weight.numpy().std() / (2 / 400) ** 0.5 - 1) < 0.02
    assert abs(conv.weight.numpy().std() / (2 / (32 * 15)) ** 0.5 - 1) < 0.02
    assert abs(linear.weight.numpy().mean()) < 1e-3
    assert (linear.bias.numpy() == 0).all()
    assert (conv.bias.numpy() == 0).all()
    mytorch.manual_seed(0)
    assert (nn.Linear(400, 300).weight.numpy() == linear.weight.numpy()).all()


def test_sequential():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    assert len(model) == 3
    assert model[-1] is list(model)[2]
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert model(Tensor.ones((4, 2))).shape == (4, 1)
    x = Tensor.ones((1,))
    assert nn.Sequential()(x) is x


def test_train_and_eval_reach_everything():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    assert model.eval() is model
    assert not any(module.training for _, module in model.named_modules())
    assert all(module.training for _, module in model.train().named_modules())


def test_zero_grad():
    model = nn.Linear(2, 2)
    model(Tensor.ones((1, 2))).sum().backward()
    assert all(x.grad is not None for x in model.parameters())
    model.zero_grad()
    assert all(x.grad is None for x in model.parameters())


def test_astype_is_in_place_with_gradients():
    model = nn.Linear(2, 2)
    weight = model.weight
    model(Tensor.ones((1, 2))).sum().backward()
    assert model.astype("float64") is model
    assert model.weight is weight
    assert weight.dtype == weight.grad.dtype == mytorch.float64
    assert model(Tensor.ones((1, 2), dtype="float64")).dtype == mytorch.float64
    counted = Model().astype("float16")
    assert counted.count.dtype == mytorch.int64
    with pytest.raises(TypeError, match="expected float16, float32 or float64, got int64"):
        model.astype("int64")


@pytest.mark.gpu
def test_to_is_in_place_with_gradients():
    with on("cuda") as device:
        model = nn.Linear(2, 2)
        weight, before = model.weight, model.weight.numpy()
        model(Tensor.ones((1, 2))).sum().backward()
        assert model.to(Device.CPU) is model.to(device) is model
        assert model.weight is weight
        assert weight.device is weight.grad.device is model.bias.device is device
        assert (weight.numpy() == before).all()
        assert (model.to(Device.CPU).weight.numpy() == before).all()
        with pytest.raises(ValueError, match="one device"):
            model(Tensor.ones((1, 2), device=device))


# State.


def test_state_round_trips_in_memory():
    first, second = Model(), Model()
    state = first.state_dict()
    second.load_state_dict(state)
    for name, value in second.state_dict().items():
        assert (value == state[name]).all()
    # It is a copy.
    state["scale"][:] = 7
    assert (first.scale.numpy() == 1).all()
    second.load_state_dict({name: value.astype("float64") for name, value in state.items()})
    assert second.scale.dtype == mytorch.float32
    assert (second.scale.numpy() == 7).all()


def test_state_round_trips_through_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    first, second = Model(), Model()
    first.save(tmp_path / "model.safetensors")
    weight = second.blocks[0].weight
    assert second.load(tmp_path / "model.safetensors") is second
    assert second.blocks[0].weight is weight
    for name, value in second.state_dict().items():
        assert value.dtype == first.state_dict()[name].dtype
        assert (value == first.state_dict()[name]).all()
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "model.safetensors")
    assert (theirs["blocks.0.weight"].numpy() == first.blocks[0].weight.numpy()).all()


def test_a_state_that_does_not_fit_names_everything_and_changes_nothing():
    model = Model()
    state = model.state_dict()
    del state["scale"], state["heads.a.bias"]
    state["other"], state["blocks.0.weight"] = np.zeros(2), np.zeros((3, 2))
    before = model.state_dict()
    with pytest.raises(ValueError, match="does not fit") as error:
        model.load_state_dict(state)
    assert (
        "missing: scale, heads.a.bias; unexpected: other; wrongly shaped: blocks.0.weight (expected [2, 3], got [3, 2])"
        in str(error.value)
    )
    assert all((value == before[name]).all() for name, value in model.state_dict().items())


def test_files_that_cannot_be_loaded(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        nn.Linear(1, 1).load(tmp_path / "nothing")
    (tmp_path / "foreign").write_bytes(b"hello, this is no such file")
    with pytest.raises(ValueError, match="is not a file in the safetensors format"):
        nn.Linear(1, 1).load(tmp_path / "foreign")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        nn.Linear(1, 1).save(tmp_path / "model")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(0, 3), "Linear's inputs is an integer of at least 1, not 0"),
        (lambda: nn.Embedding(3, 2.5), "Embedding's width is an integer of at least 1, not 2.5"),
        (lambda: nn.Conv2D(1, 1, 0), "size is one integer or two, of at least 1, not 0"),
        (lambda: nn.Conv2D(1, 1, 1, stride=0), "stride is one integer or two"),
        (lambda: nn.Dropout(1.5), "Dropout's p is a probability, not 1.5"),
        (lambda: nn.MultiHeadAttention(10, 4), "got width 10, heads 4, kv_heads 4"),
        (lambda: nn.MultiHeadAttention(8, 4, kv_heads=3), "got width 8, heads 4, kv_heads 3"),
        (lambda: nn.MultiHeadAttention(8, 4)(Tensor.ones((3, 8))), "attention wants [B, T, width], got [3, 8]"),
        (lambda: nn.Sequential(nn.ReLU(), len), "number 1 is builtin_function_or_method"),
        (lambda: nn.MSELoss()(Tensor.ones((3, 1)), Tensor.ones((3,))), "two tensors of one shape, got [3, 1] and [3]"),
        (
            lambda: nn.CrossEntropyLoss()(Tensor.ones((3, 2)), Tensor.ones((3,))),
            "int64 targets [...], got [3, 2] and float32 [3]",
        ),
        (lambda: nn.CrossEntropyLoss()(Tensor.ones((3, 2)), Tensor.arange(2)), "got [3, 2] and int64 [2]"),
        (
            lambda: nn.CrossEntropyLoss()(Tensor.ones((3, 2)), Tensor.arange(3)),
            "numbers from 0 to 2, and only 0 to 1 are there",
        ),
        (lambda: nn.Module()(1), "Module must implement forward"),
    ],
)
def test_errors(make, said):
    with pytest.raises((ValueError, TypeError, IndexError, NotImplementedError)) as error:
        make()
    assert said in str(error.value)


def test_a_state_that_cannot_be_taken_changes_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = model.state_dict()
    broken = {name: np.ones(x.shape) for name, x in before.items()}
    with pytest.raises(ValueError, match="could not convert"):
        model.load_state_dict(broken | {list(broken)[-1]: np.array(["a", "b"])})
    assert all((model.state_dict()[name] == before[name]).all() for name in before)


def test_attention_of_nothing():
    layer = nn.MultiHeadAttention(8, 2)
    for shape in ((0, 3, 8), (2, 0, 8)):
        assert layer(Tensor.zeros(shape)).shape == shape
