"""Recorded cases of an independent float64 implementation (tests/golden/README.md), by every backend."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise import (
    block_sparse_attn,
    compressed_attention,
    flash_attention,
    flash_attention_with_kvcache,
    hstu_attention,
    hstu_attention_with_bsa,
    native_sparse_attend,
    native_sparse_attention,
    selected_attention,
)
from tilewise.ops.nsa.reference import choice_scores, compress_mean

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))
CPU = torch.device("cpu")
GATES = ("gate_cmp", "gate_slc", "gate_swa")
# What the recorded inputs of native_sparse_attend are called in its signature.
ATTEND = {"q": "fq", "k": "fk", "v": "fv", "indices": "selected_block_indices", "mask": "fmask"}


def named(*names):
    return lambda outputs: dict(zip(names, outputs, strict=True))


def of_flash(leaves, params, backend):
    if "window_size" in params:
        params["window_size"] = tuple(params["window_size"])
    return named("o", "lse")(flash_attention(**leaves, **params, return_lse=True, backend=backend))


def of_cache(leaves, params, backend):
    params["window_size"] = tuple(params["window_size"])
    outputs = flash_attention_with_kvcache(**leaves, **params, return_lse=True, backend=backend)
    return named("o", "lse")(outputs) | {name: leaves[name] for name in ("k_cache", "v_cache")}


def of_native(leaves, params, backend):
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
    return named("o", "lse")(selected_attention(**leaves, **params, return_lse=True, backend=backend))


def of_attend(leaves, params, backend):
    o, lse = native_sparse_attend(
        **{ATTEND.get(name, name): x for name, x in leaves.items()}, **params, return_lse=True, backend=backend
    )
    if not params.get("return_sliding_window_out"):
        return {"o": o, "lse": lse}
    return {"o": o[0], "o_win": o[1], "lse": lse[0], "lse_win": lse[1]}


def of_hstu(leaves, params, backend):
    if "num_targets" in params:
        params["num_targets"] = torch.tensor(params["num_targets"], device=leaves["q"].device)
    return {"o": hstu_attention(**leaves, **params, backend=backend)}


def of_bsa(leaves, params, backend):
    return named("o", "block_indices")(block_sparse_attn(**leaves, **params, backend=backend))


def of_layer(leaves, params, backend):
    """The recorded gates are what gate_model returns, whatever it is given."""
    gates = [leaves.pop(name) for name in GATES]
    length = params.pop("padded_length")
    mask = torch.ones(len(gates[0]), length, length, dtype=torch.bool)
    return named("attn_output", "padded_q", "padded_k")(
        hstu_attention_with_bsa(**leaves, **params, invalid_attn_mask=mask, gate_model=lambda _: gates, backend=backend)
    )


# By how the name of a file starts, the first that fits; and how many files there are.
FUNCTIONS = {
    "flash-": (of_flash, 12),
    "kvcache-": (of_cache, 1),
    "nsa-": (of_native, 3),
    "selected-": (of_selected, 1),
    "native-sparse-attend": (of_attend, 2),
    "hstu-attention-with-bsa": (of_layer, 1),
    "hstu-": (of_hstu, 5),
    "bsa-": (of_bsa, 2),
}


def start(path):
    return next(start for start in FUNCTIONS if path.stem.startswith(start))


def check(path, backend, dtype, device, values=1e-5, derivatives=1e-4):
    with np.load(path) as archive:
        data = dict(archive)
    inputs = {name[3:]: torch.from_numpy(x).to(device) for name, x in data.items() if name.startswith("in_")}
    floats = {name: x.to(dtype) for name, x in inputs.items() if x.is_floating_point()}
    wanted = {name: x for name, x in floats.items() if name not in GATES} if "weighted_output" in data else {}
    for x in wanted.values():
        x.requires_grad_()
    outputs = FUNCTIONS[start(path)][0](inputs | floats, json.loads(str(data["params"])), backend)

    expected = {name[4:]: x for name, x in data.items() if name.startswith("out_")}
    assert set(expected) <= set(outputs)
    for name, x in expected.items():
        np.testing.assert_allclose(outputs[name].detach().cpu().double(), x, rtol=values, atol=values, err_msg=name)

    if not wanted:
        # For inference.
        return
    weighted = outputs[str(data["weighted_output"])]
    weight = torch.from_numpy(data["weight"]).to(device, weighted.dtype)
    loss = torch.where(weighted.isfinite(), weighted * weight, 0.0).sum()
    assert {f"deriv_{name}" for name in wanted} == {name for name in data if name.startswith("deriv_")}
    # What an input takes no part in has no gradient, and 0 is recorded.
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    for name, gradient in zip(wanted, gradients, strict=True):
        along = (gradient.cpu().double().numpy() * data[f"dir_{name}"]).sum()
        np.testing.assert_allclose(along, data[f"deriv_{name}"], rtol=derivatives, atol=derivatives, err_msg=name)


def test_there_are_golden_cases():
    assert {name: sum(start(path) == name for path in FILES) for name in FUNCTIONS} == {
        name: count for name, (_, count) in FUNCTIONS.items()
    }


@pytest.mark.parametrize(
    ("dtype", "values", "derivatives"), [(torch.float64, 1e-9, 1e-6), (torch.float32, 1e-5, 1e-4)], ids=["fp64", "fp32"]
)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_reference(path, dtype, values, derivatives):
    check(path, "reference", dtype, CPU, values, derivatives)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cpu(path):
    check(path, "cpu", torch.float32, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_triton(path, device):
    check(path, "triton", torch.float32, device)
