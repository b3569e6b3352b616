"""Recorded cases of an independent float64 implementation (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import block_sparse_attn, hstu_attention_with_bsa

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(path for pattern in ("bsa-*.npz", "hstu-attention-with-bsa.npz") for path in GOLDEN.glob(pattern))
GATES = ("gate_cmp", "gate_slc", "gate_swa")


def of_attention(leaves, params, backend):
    return dict(zip(("o", "block_indices"), block_sparse_attn(**leaves, **params, backend=backend), strict=True))


def of_layer(leaves, params, backend):
    """The recorded gates are what gate_model returns, whatever it is given."""
    gates = [leaves[name] for name in GATES]
    length = params["padded_length"]
    mask = torch.ones(len(gates[0]), length, length, dtype=torch.bool)
    sizes = {name: value for name, value in params.items() if name != "padded_length"}
    tensors = {name: x for name, x in leaves.items() if name not in GATES}
    outputs = hstu_attention_with_bsa(
        **tensors, **sizes, invalid_attn_mask=mask, gate_model=lambda _: gates, backend=backend
    )
    return dict(zip(("attn_output", "padded_q", "padded_k"), outputs, strict=True))


def run(path, backend, dtype, device):
    with np.load(path) as archive:
        data = dict(archive)
    inputs = {name[3:]: torch.from_numpy(x).to(device) for name, x in data.items() if name.startswith("in_")}
    differentiated = {name[6:] for name in data if name.startswith("deriv_")}
    leaves = {
        name: x.to(dtype).requires_grad_(name in differentiated) if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    outputs = (of_attention if path.stem.startswith("bsa") else of_layer)(
        leaves, json.loads(str(data["params"])), backend
    )
    weighted = outputs[str(data["weighted_output"])]
    loss = (weighted * torch.from_numpy(data["weight"]).to(device, weighted.dtype)).sum()
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    # A gate without its branch has no gradient, and 0 is recorded.
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return data, outputs, dict(zip(wanted, gradients, strict=True))


def check(data, outputs, gradients, values, derivatives):
    expected = {name[4:]: x for name, x in data.items() if name.startswith("out_")}
    assert set(expected) <= set(outputs)
    for name, x in expected.items():
        np.testing.assert_allclose(outputs[name].detach().cpu().double(), x, rtol=values, atol=values, err_msg=name)
    assert {"q", "k", "v", "u"} <= set(gradients)
    for name, gradient in gradients.items():
        along = (gradient.cpu().double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives, err_msg=name)


def test_there_are_golden_cases():
    assert len(FILES) == 3


@pytest.mark.parametrize(
    ("dtype", "values", "derivatives"), [(torch.float64, 1e-9, 1e-6), (torch.float32, 1e-5, 1e-4)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference(path, dtype, values, derivatives):
    check(*run(path, "reference", dtype, torch.device("cpu")), values, derivatives)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cpu(path):
    check(*run(path, "cpu", torch.float32, torch.device("cpu")), values=1e-5, derivatives=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_triton(path, device):
    check(*run(path, "triton", torch.float32, device), values=1e-5, derivatives=1e-4)
