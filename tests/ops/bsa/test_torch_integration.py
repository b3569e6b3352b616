"""Block-sparse attention inside torch: custom operators, torch.compile, autocast, double backward, no_grad."""

import pytest
import torch
from battery import first_quick
from bsa_inputs import GATES, inputs
from torch import library

from tilewise import block_sparse_attn, hstu_attention_with_bsa
from tilewise.ops.bsa import api, hstu_bsa

SMALL = {"block_counts": 2, "block_size": 8, "window_size": 6}


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.gpu), "cpu"])
def place(request, device):
    """A backend and a device that it runs on."""
    return request.param, device if request.param == "triton" else torch.device("cpu")


def skip_if_interpreted(place):
    """What is the same for every backend is not checked with interpreted kernels, which take a minute for it."""
    if place[0] == "triton" and place[1].type == "cpu":
        pytest.skip("interpreted kernels are slow: checked with the CPU backend")


def leaves(device, *, packed=False, dtype=torch.float32, tokens=21):
    """By name: q, k, v, u and the gates; few, for kernels may be interpreted."""
    given = inputs(tokens, heads=2, values=16, batch=1)
    return {name: (x[0] if packed else x).to(device, dtype).requires_grad_() for name, x in given.items()}


def offsets(device):
    return torch.tensor([0, 9, 9, 21], device=device)


def detached(arguments):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


CASES = {
    "all": (False, GATES, 6, True),
    "packed": (True, GATES, 6, False),
    "no-window": (False, ("g_cmp", "g_slc"), 0, True),
    "packed-no-gates": (True, (), 0, True),
}


@pytest.mark.parametrize("name", first_quick(CASES))
def test_opcheck(place, name):
    packed, gates, window, interleave = CASES[name]
    if name not in ("packed", "no-window"):
        skip_if_interpreted(place)
    backend, device = place
    given = leaves(device, packed=packed)
    tensors = [x if key not in GATES or key in gates else None for key, x in given.items()]
    cu, numbers = offsets(device) if packed else None, (2, 8, window, 0.25, interleave, backend)
    library.opcheck(api.bsa_forward.overload, (*tensors, cu, *numbers))
    o, *made = api.bsa_forward(*detached(tensors), cu, *numbers)
    library.opcheck(api.bsa_backward.overload, (torch.randn_like(o), *detached(tensors), *made, cu, *numbers))


def test_opcheck_of_the_places():
    library.opcheck(hstu_bsa.bsa_slots.overload, (torch.tensor([0, 9, 9, 21]), 21, 16))
    library.opcheck(hstu_bsa.bsa_slots.overload, (torch.tensor([0], dtype=torch.int32), 0, 16))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(place, dynamic):
    backend, device = place

    def run(q, k, v, u, **gates):
        o, chosen = block_sparse_attn(q * 2, k, v, u, **gates, **SMALL, backend=backend)
        return o.sin().sum() + chosen.sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (21, 30):
        plain, traced = leaves(device, tokens=tokens), leaves(device, tokens=tokens)
        expected, actual = run(**plain), compiled(**traced)
        torch.testing.assert_close(actual, expected)
        expected.backward()
        actual.backward()
        for name in plain:
            assert torch.equal(traced[name].grad, plain[name].grad), name


def test_compile_packed(place):
    backend, device = place

    def run(seq_offsets, **tensors):
        return block_sparse_attn(**tensors, **SMALL, seq_offsets=seq_offsets, backend=backend)

    tensors = leaves(device, packed=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(offsets(device), **tensors), run(offsets(device), **tensors), strict=True):
        assert torch.equal(actual, expected)


class Layer(torch.nn.Module):
    """What an HSTU layer does with it: gates by a linear map of each head's queries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gates = torch.nn.Linear(16, 3)

    def forward(self, x, x_offsets, mask, backend):
        def gate_model(padded_q):
            return self.gates(padded_q).sigmoid().unbind(-1)

        return hstu_attention_with_bsa(2, 16, 16, *x, x_offsets, mask, gate_model, **SMALL, backend=backend)


def layer_inputs(device):
    given = leaves(device, packed=True)
    x = [given[name].detach().flatten(1).requires_grad_() for name in ("q", "k", "v", "u")]
    return x, offsets(device), torch.ones(3, 16, 16, dtype=torch.bool, device=device)


def test_compile_the_layer(place):
    backend, device = place
    layer = Layer().to(device)
    x, x_offsets, mask = layer_inputs(device)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        outputs = function(x, x_offsets, mask, backend)
        gradients = torch.autograd.grad(sum(o.square().sum() for o in outputs), [*x, *layer.parameters()])
        results.append([*outputs, *gradients])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_autocast(place):
    backend, device = place
    tensors = leaves(device)
    low = {name: x.detach().bfloat16() for name, x in tensors.items()}
    expected, blocks = block_sparse_attn(**low, **SMALL, backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o, chosen = block_sparse_attn(**tensors, **SMALL, backend=backend)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected)
    assert torch.equal(chosen, blocks)
    o.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in tensors.values())


def test_autocast_of_the_layer(place):
    """The gate model runs with autocast, as it would alone; the padded tensors keep their dtype."""
    backend, device = place
    layer = Layer().to(device)
    x, x_offsets, mask = layer_inputs(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o, padded_q, padded_k = layer(x, x_offsets, mask, backend)
        gates = layer.gates(padded_q).sigmoid().unbind(-1)
    assert gates[0].dtype == torch.bfloat16
    assert (o.dtype, padded_q.dtype, padded_k.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    rows = hstu_bsa.bsa_slots(x_offsets, 21, 16)
    by_head = [tensor.detach().bfloat16().unflatten(-1, (2, 16)) for tensor in x]
    packed_gates = [gate.flatten(0, 1)[rows] for gate in gates]
    expected, _ = block_sparse_attn(*by_head, *packed_gates, **SMALL, seq_offsets=x_offsets, backend=backend)
    assert torch.equal(o, expected.flatten(1))
    o.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in (*x, *layer.parameters()))


def test_autocast_does_not_reach_into_the_backward(place):
    backend, device = place
    tensors = leaves(device, dtype=torch.bfloat16)
    o, _ = block_sparse_attn(**tensors, **SMALL, backend=backend)
    expected = torch.autograd.grad(o.sum(), list(tensors.values()), retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(o.sum(), list(tensors.values()))
    assert all(torch.equal(a, b) for a, b in zip(inside, expected, strict=True))


def test_meta_tensors_run_through_the_reference():
    tensors = {name: x.detach().to("meta") for name, x in leaves("cpu").items()}
    assert block_sparse_attn(**tensors, **SMALL, backend="reference")[0].shape == (1, 21, 2, 16)
    with pytest.raises(ValueError, match="the tensors are on meta: .*backend='reference'"):
        block_sparse_attn(**tensors, **SMALL)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_torch_s_default_dtype_changes_nothing(place, packed):
    backend, device = place
    tensors = leaves(device, packed=packed)
    seq_offsets = offsets(device) if packed else None

    def run():
        o, chosen = block_sparse_attn(**tensors, **SMALL, seq_offsets=seq_offsets, backend=backend)
        return [o, chosen, *torch.autograd.grad(o, list(tensors.values()), torch.ones_like(o))]

    expected = run()
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            with_default = run()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(with_default, expected, strict=True)), default


def test_transforms_and_forward_mode_are_refused(place):
    backend, device = place
    tensors = {name: x.detach() for name, x in leaves(device).items()}
    q = tensors.pop("q")

    def run(q):
        return block_sparse_attn(q, **tensors, **SMALL, backend=backend)[0]

    for transform in (lambda: torch.func.vmap(run)(q[None]), lambda: torch.func.grad(lambda q: run(q).sum())(q)):
        with pytest.raises(NotImplementedError, match="torch.func.*backend='reference'"):
            transform()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode.*backend='reference'"),
    ):
        run(torch.autograd.forward_ad.make_dual(q, q))


def test_double_backward_says_what_to_do(place):
    backend, device = place
    tensors = leaves(device)
    o, _ = block_sparse_attn(**tensors, **SMALL, backend=backend)
    (dq,) = torch.autograd.grad(o.square().sum(), tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward.*backend='reference'"):
        dq.sum().backward()


def test_only_the_inputs_that_want_a_gradient_get_one(place):
    backend, device = place
    tensors = leaves(device)
    expected = torch.autograd.grad(
        block_sparse_attn(**tensors, **SMALL, backend=backend)[0].sum(), list(tensors.values())
    )
    for which, gradient in zip(tensors, expected, strict=True):
        if backend == "triton" and which not in ("k", "u", "g_slc"):
            continue
        alone = {name: x.detach().requires_grad_(name == which) for name, x in tensors.items()}
        block_sparse_attn(**alone, **SMALL, backend=backend)[0].sum().backward()
        assert torch.equal(alone[which].grad, gradient), which
        assert all(x.grad is None for name, x in alone.items() if name != which)


def test_incoming_gradients_of_any_strides(place):
    """`o.sum().backward()` gives stride 0."""
    backend, device = place
    tensors = leaves(device)
    o, chosen = block_sparse_attn(**tensors, **SMALL, backend=backend)
    assert not chosen.requires_grad
    expanded = torch.autograd.grad(
        o, list(tensors.values()), torch.ones((), device=device).expand(o.shape), retain_graph=True
    )
    plain = torch.autograd.grad(o, list(tensors.values()), torch.ones_like(o))
    assert all(torch.equal(a, b) for a, b in zip(expanded, plain, strict=True))


def test_no_grad_and_inference_mode(place):
    backend, device = place
    tensors = leaves(device)
    expected, _ = block_sparse_attn(**tensors, **SMALL, backend=backend)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, _ = block_sparse_attn(**tensors, **SMALL, backend=backend)
        assert not o.requires_grad
        assert torch.equal(o, expected)
