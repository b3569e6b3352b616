"""GateModel: three gates of the queries, in the form that hstu_attention_with_bsa wants."""

import pytest
import torch

import tilewise
from tilewise.nn import GateModel


def draw(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make(*sizes, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return GateModel(*sizes, dtype=dtype)


def test_forward_is_its_parts():
    model, q = make(8, 5), draw(2, 7, 3, 8)
    x = q @ model.to_hidden.weight.T + model.to_hidden.bias
    x = x / (1 + torch.exp(-x)) @ model.to_gates.weight.T + model.to_gates.bias
    expected = 1 / (1 + torch.exp(-x))
    gates = model(q)
    assert isinstance(gates, tuple)
    assert len(gates) == 3
    for i, gate in enumerate(gates):
        assert gate.shape == (2, 7, 3)
        torch.testing.assert_close(gate, expected[..., i], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 8), (7, 3, 8), (2, 7, 3, 8), (0, 3, 8)], ids=str)
def test_any_axes_before_heads(shape):
    model, q = make(8), draw(*shape)
    for gate in model(q):
        assert gate.shape == shape[:-1]
        assert ((gate > 0) & (gate < 1)).all()


def test_every_head_and_token_is_for_itself():
    model, q = make(8), draw(5, 3, 8)
    changed = q.clone()
    changed[2, 1] = 1.0
    for before, after in zip(model(q), model(changed), strict=True):
        differs = before != after
        assert differs[2, 1]
        assert differs.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_a_gate_model_of_the_operator(dtype):
    """Gradients reach every parameter, and the query that gates are made of."""
    model = make(8, 6, dtype=dtype)
    offsets, heads, channels, values = torch.tensor([0, 20, 20, 53]), 2, 8, 4
    q, k, v, u = (
        draw(53, heads * d, dtype=torch.float32, seed=i).to(dtype)
        for i, d in enumerate((channels, channels, values, values))
    )
    mask = torch.zeros(3, 40, 40, dtype=torch.bool)
    o, padded_q, _ = tilewise.hstu_attention_with_bsa(
        heads, channels, values, q, k, v, u, offsets, mask, model, block_size=8, window_size=5
    )
    gates = model(q.unflatten(1, (heads, channels)))
    q, k, v, u = (x.unflatten(1, (heads, -1)) for x in (q, k, v, u))
    expected, _ = tilewise.block_sparse_attn(
        q, k, v, u, *gates, block_counts=4, block_size=8, window_size=5, seq_offsets=offsets
    )
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(o, expected.flatten(1), rtol=tolerance, atol=tolerance)
    assert padded_q.shape == (3, 40, heads, channels)
    o.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.norm() > 0, name


def test_reset_parameters_draws_anew():
    model, other = make(8, seed=0), make(8, seed=1)
    assert not torch.equal(model.to_hidden.weight, other.to_hidden.weight)
    torch.manual_seed(0)
    other.reset_parameters()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_state_dict_saves_and_loads(tmp_path):
    model, other, q = make(8, seed=0), make(8, seed=1), draw(5, 3, 8)
    torch.save(model.state_dict(), tmp_path / "gates.pt")
    assert not torch.equal(model(q)[0], other(q)[0])
    other.load_state_dict(torch.load(tmp_path / "gates.pt", weights_only=True))
    for before, after in zip(model(q), other(q), strict=True):
        assert torch.equal(before, after)


def test_widths_and_places():
    model = GateModel(24, device="meta", dtype=torch.bfloat16)
    assert {(x.device.type, x.dtype) for x in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.to_hidden.out_features == 48
    assert GateModel(24, 7).to_hidden.out_features == 7


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ((0,), ValueError, "channels is 0: expected a whole number of at least 1"),
        ((8, 0), ValueError, "hidden is 0: expected a whole number of at least 1"),
        ((8, 2.5), TypeError, "hidden is 2.5: expected a whole number"),
    ],
)
def test_bad_sizes(sizes, error, message):
    with pytest.raises(error, match=message):
        GateModel(*sizes)


def test_bad_input():
    model = make(8)
    with pytest.raises(TypeError, match="q is a list: expected a torch.Tensor"):
        model([1.0])
    for shape in ((8,), (5, 3, 7)):
        with pytest.raises(ValueError, match=r"q has shape \[.*\]: expected \[.., H, 8\]"):
            model(draw(*shape))
