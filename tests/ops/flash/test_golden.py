"""Recorded cases of an independent float64 implementation (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import flash_attention

FILES = sorted((Path(__file__).parents[2] / "golden").glob("flash-*.npz"))


def run(path, backend, dtype, device):
    with np.load(path) as archive:
        data = dict(archive)
    params = json.loads(str(data.pop("params")))
    if "window_size" in params:
        params["window_size"] = tuple(params["window_size"])
    inputs = {name[3:]: torch.from_numpy(x).to(device) for name, x in data.items() if name.startswith("in_")}
    leaves = {name: x.to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    o, lse = flash_attention(**leaves, **params, return_lse=True, backend=backend)
    outputs = {"o": o, "lse": lse}
    weighted = outputs[str(data["weighted_output"])]
    weight = torch.from_numpy(data["weight"]).to(device, weighted.dtype)
    loss = torch.where(weighted.isfinite(), weighted * weight, 0.0).sum()
    gradients = torch.autograd.grad(loss, [leaves[name] for name in "qkv"], materialize_grads=True)
    return data, outputs, dict(zip("qkv", gradients, strict=True))


def check(data, outputs, gradients, values, derivatives):
    for name, x in outputs.items():
        np.testing.assert_allclose(x.detach().cpu().double(), data[f"out_{name}"], rtol=values, atol=values)
    for name, gradient in gradients.items():
        along = (gradient.cpu().double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives)


def test_there_are_golden_cases():
    assert len(FILES) == 7


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference(path):
    check(*run(path, "reference", torch.float64, torch.device("cpu")), values=1e-9, derivatives=1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cpu(path):
    check(*run(path, "cpu", torch.float32, torch.device("cpu")), values=1e-5, derivatives=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_triton(path, device):
    check(*run(path, "triton", torch.float32, device), values=1e-5, derivatives=1e-4)
