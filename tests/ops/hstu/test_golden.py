"""Recorded cases of an independent float64 implementation (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import hstu_attention

NAMES = ("causal", "context", "full", "max-length", "targets")
FILES = [Path(__file__).parents[2] / "golden" / f"hstu-{name}.npz" for name in NAMES]


def check(path, backend, dtype, device, values, derivatives):
    with np.load(path) as archive:
        data = dict(archive)
    params = json.loads(str(data.pop("params")))
    if "num_targets" in params:
        params["num_targets"] = torch.tensor(params["num_targets"], device=device)
    inputs = {name[3:]: torch.from_numpy(x).to(device) for name, x in data.items() if name.startswith("in_")}
    leaves = {name: x.to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    o = hstu_attention(**leaves, **params, backend=backend)
    np.testing.assert_allclose(o.detach().cpu().double(), data["out_o"], rtol=values, atol=values)
    gradients = torch.autograd.grad(
        (o * torch.from_numpy(data["weight"]).to(device, dtype)).sum(), [leaves[name] for name in "qkv"]
    )
    for name, gradient in zip("qkv", gradients, strict=True):
        along = (gradient.cpu().double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference(path):
    check(path, "reference", torch.float64, torch.device("cpu"), values=1e-9, derivatives=1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cpu(path):
    check(path, "cpu", torch.float32, torch.device("cpu"), values=1e-5, derivatives=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_triton(path, device):
    check(path, "triton", torch.float32, device, values=1e-5, derivatives=1e-4)
