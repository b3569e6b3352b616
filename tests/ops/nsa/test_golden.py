"""Recorded cases of an independent float64 implementation (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import compressed_attention, native_sparse_attend, native_sparse_attention, selected_attention
from tilewise.ops.nsa.reference import choice_scores, compress_mean

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(
    path for pattern in ("nsa-*.npz", "native-sparse-attend*.npz", "selected-*.npz") for path in GOLDEN.glob(pattern)
)
# What the recorded inputs of native_sparse_attend are called in its signature.
ATTEND = {"q": "fq", "k": "fk", "v": "fv", "indices": "selected_block_indices", "mask": "fmask"}


def of_attention(leaves, params, backend):
    o, block_indices = native_sparse_attention(**leaves, **params, return_indices=True, backend=backend)
    windows = {name: params[name] for name in ("compress_size", "compress_stride")}
    block_size = params["block_size"]
    q, k, v = (leaves[name] for name in "qkv")
    k_cmp, v_cmp = (compress_mean(x, **windows) for x in (k, v))
    o_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, **windows, return_lse=True, backend=backend)
    o_slc, lse_slc = selected_attention(q, k, v, block_indices, block_size=block_size, return_lse=True, backend=backend)
    only_window = {"g_cmp": None, "g_slc": None, "g_swa": torch.ones_like(leaves["g_swa"])}
    o_swa = native_sparse_attention(q, k, v, **only_window, **params, backend=backend)
    # The recorded scores bear no marks: no block is forced, and a later one, which no window that has ended reaches,
    # has 0.
    scores = choice_scores(q, k_cmp, **windows, block_size=block_size, init_blocks=0, local_blocks=0)
    scores = scores.masked_fill(scores == -torch.inf, 0.0)
    branches = {"o_cmp": o_cmp, "lse_cmp": lse_cmp, "o_slc": o_slc, "lse_slc": lse_slc, "o_swa": o_swa}
    return {"o": o, "block_indices": block_indices, "scores": scores, **branches}


def of_selected(leaves, params, backend):
    return dict(
        zip(("o", "lse"), selected_attention(**leaves, **params, return_lse=True, backend=backend), strict=True)
    )


def of_attend(leaves, params, backend):
    o, lse = native_sparse_attend(
        **{ATTEND.get(name, name): x for name, x in leaves.items()}, **params, return_lse=True, backend=backend
    )
    if not params.get("return_sliding_window_out"):
        return {"o": o, "lse": lse}
    return {"o": o[0], "o_win": o[1], "lse": lse[0], "lse_win": lse[1]}


def run(path, backend, dtype, device):
    with np.load(path) as archive:
        data = dict(archive)
    inputs = {name[3:]: torch.from_numpy(x).to(device) for name, x in data.items() if name.startswith("in_")}
    leaves = {name: x.to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    function = next(
        of
        for start, of in (("nsa", of_attention), ("selected", of_selected), ("native", of_attend))
        if path.stem.startswith(start)
    )
    outputs = function(leaves, json.loads(str(data["params"])), backend)
    weighted = outputs[str(data["weighted_output"])]
    weight = torch.from_numpy(data["weight"]).to(device, weighted.dtype)
    loss = torch.where(weighted.isfinite(), weighted * weight, 0.0).sum()
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return data, outputs, dict(zip(wanted, gradients, strict=True))


def check(data, outputs, gradients, values, derivatives):
    expected = {name[4:]: x for name, x in data.items() if name.startswith("out_")}
    assert set(expected) <= set(outputs)
    for name, x in expected.items():
        np.testing.assert_allclose(outputs[name].detach().cpu().double(), x, rtol=values, atol=values, err_msg=name)
    assert {f"deriv_{name}" for name in gradients} == {name for name in data if name.startswith("deriv_")}
    for name, gradient in gradients.items():
        along = (gradient.cpu().double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives, err_msg=name)


def test_there_are_golden_cases():
    assert len(FILES) == 6


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
