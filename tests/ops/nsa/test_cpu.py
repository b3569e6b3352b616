"""The CPU backend against the reference in fp64: outputs, LSEs, choices and all gradients."""

import pytest
import torch
from nsa_inputs import (
    CASES,
    GATES,
    LENGTHS,
    SMALL,
    assert_close,
    assert_right,
    attend_inputs,
    case,
    cumulative,
    differentiate,
    inputs,
)

from tilewise import (
    compressed_attention,
    native_sparse_attend,
    native_sparse_attention,
    select_blocks,
    selected_attention,
)
from tilewise.ops.nsa import reference
from tilewise.verify.compare import compare_choices

WINDOWS = {"compress_size": 8, "compress_stride": 4}


@pytest.mark.parametrize("name", CASES)
def test_native_sparse_attention(name):
    tensors, options = case(name)
    assert_right(lambda **x: native_sparse_attention(**x, **options), tensors)


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if "g_slc" in CASES[name].get("gates", GATES) and name not in ("no-tokens", "no-batch")],
)
def test_the_choice(name):
    tensors, options = case(name)
    sizes = {name: options[name] for name in ("compress_size", "compress_stride")}
    cu_seqlens = options.get("cu_seqlens")
    k_cmp = (
        tensors["k_cmp"] if "k_cmp" in tensors else reference.compress_mean(tensors["k"], *sizes.values(), cu_seqlens)
    )
    scored = sizes | {
        name: options[name] for name in ("block_size", "init_blocks", "local_blocks", "scale") if name in options
    }
    truth, eager = (
        reference.choice_scores(tensors["q"].to(t), k_cmp.to(t), **scored, cu_seqlens=cu_seqlens)
        for t in (torch.float64, torch.float32)
    )
    assert compare_choices(options["block_indices"], truth, eager) == ""
    alone = select_blocks(
        tensors["q"], k_cmp, **scored, block_count=options["block_count"], cu_seqlens=cu_seqlens, backend="cpu"
    )
    # Other means by a rounding, so that scores that are equal but for one may change places.
    assert compare_choices(alone, truth, eager) == ""


def test_equal_scores_go_to_the_lower_index():
    q, k_cmp = torch.zeros(1, 64, 2, 4), torch.zeros(1, 16, 2, 4)
    sizes = {
        "compress_size": 4,
        "compress_stride": 4,
        "block_size": 4,
        "block_count": 4,
        "init_blocks": 0,
        "local_blocks": 1,
    }
    chosen = select_blocks(q, k_cmp, **sizes, backend="cpu")
    assert chosen[0, -1, 0].tolist() == [0, 1, 2, 15]
    assert torch.equal(chosen, select_blocks(q, k_cmp, **sizes, backend="reference"))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_compressed_attention(packed):
    tensors = inputs(packed=packed, learned=True)
    options = WINDOWS | ({"cu_seqlens": cumulative(LENGTHS)} if packed else {})
    assert_right(
        lambda **x: compressed_attention(**x, **options, return_lse=True),
        {name: tensors[name] for name in ("q", "k_cmp", "v_cmp")},
    )


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_selected_attention(packed, dtype):
    """Blocks in any order, some named twice, some after the query, some rows with none."""
    tensors = inputs(packed=packed)
    generator = torch.Generator().manual_seed(2)
    limits = (
        torch.cat([torch.full((length,), -(-length // 8)) for length in LENGTHS]) if packed else torch.full((2, 77), 10)
    )
    chosen = (torch.rand(*limits.shape, 2, 5, generator=generator) * (limits[..., None, None] + 1)).long() - 1
    chosen[..., 3, :, :] = -1
    options = {"block_size": 8, "block_indices": chosen.to(dtype)} | (
        {"cu_seqlens": cumulative(LENGTHS)} if packed else {}
    )
    assert_right(
        lambda **x: selected_attention(**x, **options, return_lse=True), {name: tensors[name] for name in "qkv"}
    )


@pytest.mark.parametrize("own", [True, False], ids=["own", "selected-only"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("index_heads", [2, 4])
def test_native_sparse_attend(index_heads, scaled, own):
    tensors, named = attend_inputs(index_heads, scaled=scaled)
    assert_right(lambda **x: native_sparse_attend(**x, **named, include_block_causal=own, return_lse=True), tensors)


def test_native_sparse_attend_with_its_window():
    tensors, named = attend_inputs(2)

    def attend(**x):
        (o, o_win), (lse, lse_win) = native_sparse_attend(**x, **named, return_lse=True, return_sliding_window_out=True)
        return o, o_win, lse, lse_win

    assert_right(attend, tensors)
    pair = native_sparse_attend(**tensors, **named, return_sliding_window_out=True, backend="cpu")
    assert [tuple(x.shape) for x in pair] == [(2, 4, 45, 12)] * 2


@pytest.mark.parametrize("own", [True, False])
def test_native_sparse_attend_with_no_slots(own):
    tensors, named = attend_inputs(2, slots=0)
    assert_right(lambda **x: native_sparse_attend(**x, **named, include_block_causal=own, return_lse=True), tensors)


def test_selected_attention_with_no_slots():
    tensors = inputs()
    none = torch.zeros(2, 77, 2, 0, dtype=torch.int32)
    o, lse = selected_attention(
        tensors["q"], tensors["k"], tensors["v"], none, block_size=8, return_lse=True, backend="cpu"
    )
    assert not o.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    """Everything accumulates in fp32, so what is left is the rounding of inputs' and outputs' own dtype, gates in fp32
    beside it.
    """
    tensors = inputs(dtype=dtype)
    options = SMALL | {
        "block_indices": native_sparse_attention(**tensors, **SMALL, return_indices=True, backend="cpu")[1]
    }
    truth = differentiate(
        lambda **x: native_sparse_attention(**x, **options, backend="reference"),
        {name: x.double() for name, x in tensors.items()},
    )
    actual = differentiate(lambda **x: native_sparse_attention(**x, **options, backend="cpu"), tensors)
    assert [x.dtype for x in actual] == [dtype] * 4 + [torch.float32] * 3
    assert_close(actual, truth, tolerance=4 * torch.finfo(dtype).eps)
