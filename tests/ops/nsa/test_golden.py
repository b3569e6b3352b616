"""Recorded cases of an independent float64 implementation (tests/golden/README.md)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise.ops.nsa import reference

GOLDEN = Path(__file__).parents[2] / "golden"
FILES = sorted(path for pattern in ("nsa-*.npz", "native-sparse-attend*.npz", "selected-*.npz") for path in GOLDEN.glob(pattern))
# What the recorded inputs of native_sparse_attend are called in its signature.
ATTEND = {"q": "fq", "k": "fk", "v": "fv", "indices": "selected_block_indices", "mask": "fmask"}


def load(path, dtype):
    """The file's arrays, its keyword arguments, and its inputs by recorded name, differentiable."""
    with np.load(path) as archive:
        data = dict(archive)
    inputs = {name[3:]: torch.from_numpy(x) for name, x in data.items() if name.startswith("in_")}
    leaves = {name: x.to(dtype).requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    return data, json.loads(str(data["params"])), leaves


def of_attention(leaves, params):
    o, block_indices = reference.native_sparse_attention(**leaves, **params)
    windows = {name: params[name] for name in ("compress_size", "compress_stride")}
    block_size = params["block_size"]
    q, k, v = (leaves[name] for name in "qkv")
    k_cmp, v_cmp = (reference.compress_mean(x, **windows) for x in (k, v))
    o_cmp, lse_cmp = reference.compressed_attention(q, k_cmp, v_cmp, **windows)
    o_slc, lse_slc = reference.selected_attention(q, k, v, block_indices, block_size=block_size)
    only_window = {"g_cmp": None, "g_slc": None, "g_swa": torch.ones_like(leaves["g_swa"])}
    o_swa, _ = reference.native_sparse_attention(q, k, v, **only_window, **params)
    # The recorded scores bear no marks: no block is forced, and a later one, which no window that has ended reaches, has 0.
    scores = reference.choice_scores(q, k_cmp, **windows, block_size=block_size, init_blocks=0, local_blocks=0)
    scores = scores.masked_fill(scores == -torch.inf, 0.0)
    branches = {"o_cmp": o_cmp, "lse_cmp": lse_cmp, "o_slc": o_slc, "lse_slc": lse_slc, "o_swa": o_swa}
    return {"o": o, "block_indices": block_indices, "scores": scores, **branches}


def of_selected(leaves, params):
    return dict(zip(("o", "lse"), reference.selected_attention(**leaves, **params), strict=True))


def of_attend(leaves, params):
    o, lse = reference.native_sparse_attend(**{ATTEND.get(name, name): x for name, x in leaves.items()}, **params)
    if not params.get("return_sliding_window_out"):
        return {"o": o, "lse": lse}
    return {"o": o[0], "o_win": o[1], "lse": lse[0], "lse_win": lse[1]}


def run(path, dtype):
    data, params, leaves = load(path, dtype)
    function = next(of for start, of in (("nsa", of_attention), ("selected", of_selected), ("native", of_attend)) if path.stem.startswith(start))
    outputs = function(leaves, params)
    weighted = outputs[str(data["weighted_output"])]
    loss = torch.where(weighted.isfinite(), weighted * torch.from_numpy(data["weight"]).to(weighted.dtype), 0.0).sum()
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()))
    return data, outputs, dict(zip(wanted, gradients, strict=True))


def test_there_are_golden_cases():
    assert len(FILES) == 6


@pytest.mark.parametrize(("dtype", "values", "derivatives"), [(torch.float64, 1e-9, 1e-6), (torch.float32, 1e-5, 1e-4)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference(path, dtype, values, derivatives):
    data, outputs, gradients = run(path, dtype)
    expected = {name[4:]: x for name, x in data.items() if name.startswith("out_")}
    assert set(expected) <= set(outputs)
    for name, x in expected.items():
        np.testing.assert_allclose(outputs[name].detach().double(), x, rtol=values, atol=values, err_msg=name)
    assert {f"deriv_{name}" for name in gradients} == {name for name in data if name.startswith("deriv_")}
    for name, gradient in gradients.items():
        along = (gradient.double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives, err_msg=name)
