"""Block-sparse attention inside torch, beyond what every operator is tested for: its custom operators, the layer."""

import pytest
import torch
from battery import first_quick
from bsa_inputs import GATES, inputs
from torch import library

from tilewise import block_sparse_attn, hstu_attention_with_bsa
from tilewise.ops.bsa import api, hstu_bsa

SMALL = {"block_counts": 2, "block_size": 8, "window_size": 6}


def skip_if_interpreted(place):
    """What is the same for every backend is not checked with interpreted kernels, which take a minute for it."""
    if place[0] == "triton" and place[1].type == "cpu":
        pytest.skip("interpreted kernels are slow: checked with the CPU backend")


def leaves(device, *, packed=False):
    """By name: q, k, v, u and the gates; few, for kernels may be interpreted."""
    given = inputs(21, heads=2, values=16, batch=1)
    return {name: (x[0] if packed else x).to(device).requires_grad_() for name, x in given.items()}


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


@pytest.mark.slow
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
