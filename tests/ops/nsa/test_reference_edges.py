"""The reference where brute force does not look: packed batches, NaN that nobody sees, ties, precision,
nothing at all.
"""

import itertools

import pytest
import torch

from tilewise.ops.nsa.reference import (
    choice_scores,
    compress_mean,
    compressed_attention,
    native_sparse_attend,
    native_sparse_attention,
    select_blocks,
    selected_attention,
)

GATES = ("g_cmp", "g_slc", "g_swa")
WINDOWS = {"compress_size": 4, "compress_stride": 2}
CHOICE = {**WINDOWS, "block_size": 4, "block_count": 3, "init_blocks": 1, "local_blocks": 1}
SIZES = {**CHOICE, "window_size": 3}
SCORES = {name: x for name, x in CHOICE.items() if name != "block_count"}
ENDS = [0, 0, 9, 11, 11, 24]


def inputs(tokens=24, heads=4, kv_heads=2, channels=3, values=5, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (heads, channels), "k": (kv_heads, channels), "v": (kv_heads, values)} | dict.fromkeys(
        GATES, (heads,)
    )
    return {
        name: torch.randn(batch, tokens, *rest, generator=generator, dtype=torch.float64)
        for name, rest in shapes.items()
    }


def attend_inputs(tokens=24, block_size=4, selected=3):
    tensors = inputs(tokens)
    generator = torch.Generator().manual_seed(7)
    shape = (2, 2, tokens, selected)
    given = {"fq": tensors["q"], "fk": tensors["k"], "fv": tensors["v"]}
    return {name: x.transpose(1, 2).contiguous() for name, x in given.items()} | {
        "block_size": block_size,
        "selected_block_indices": torch.randint(0, -(-tokens // block_size), shape, generator=generator),
        "fmask": torch.rand(shape, generator=generator) < 0.5,
        "sel_scale": torch.randn(shape, generator=generator, dtype=torch.float64),
    }


def differentiable(tensors):
    return {
        name: x.clone().requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in tensors.items()
    }


def test_packed_is_each_sequence_alone():
    tensors = {name: x[0] for name, x in inputs().items()}
    q, k, v = (tensors[name] for name in "qkv")
    cu = torch.tensor(ENDS, dtype=torch.int32)
    k_cmp, v_cmp = compress_mean(k, 4, 2, cu), compress_mean(v, 4, 2, cu)
    o, indices = native_sparse_attention(**tensors, **SIZES, cu_seqlens=cu)
    o_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, **WINDOWS, cu_seqlens=cu)
    scores = choice_scores(q, k_cmp, **SCORES, cu_seqlens=cu)
    o_slc, lse_slc = selected_attention(q, k, v, indices, block_size=4, cu_seqlens=cu)
    assert (k_cmp.shape, v_cmp.shape, scores.shape, indices.shape) == ((8, 2, 3), (8, 2, 5), (24, 2, 4), (24, 2, 3))
    assert torch.equal(select_blocks(q, k_cmp, **CHOICE, cu_seqlens=cu), indices)
    windows = 0
    for start, end in itertools.pairwise(ENDS):
        rows = slice(start, end)
        alone = {name: x[None, rows] for name, x in tensors.items()}
        alone_k, alone_v = compress_mean(alone["k"], 4, 2), compress_mean(alone["v"], 4, 2)
        of_windows = slice(windows, windows + alone_k.shape[1])
        windows = of_windows.stop
        alone_o, alone_indices = native_sparse_attention(**alone, **SIZES)
        alone_scores = choice_scores(alone["q"], alone_k, **SCORES)
        alone_slc = selected_attention(alone["q"], alone["k"], alone["v"], alone_indices, block_size=4)
        alone_cmp = compressed_attention(alone["q"], alone_k, alone_v, **WINDOWS)
        pairs = [
            (k_cmp[of_windows], alone_k),
            (v_cmp[of_windows], alone_v),
            (o[rows], alone_o),
            (indices[rows], alone_indices),
        ]
        pairs += [
            (o_cmp[rows], alone_cmp[0]),
            (lse_cmp[:, rows], alone_cmp[1]),
            (o_slc[rows], alone_slc[0]),
            (lse_slc[:, rows], alone_slc[1]),
        ]
        pairs += [(scores[rows, :, : alone_scores.shape[-1]], alone_scores)]
        assert all(torch.equal(actual, expected[0]) for actual, expected in pairs)
        assert (scores[rows, :, alone_scores.shape[-1] :] == -torch.inf).all()
    assert windows == 8


def test_learned_windows_are_taken_as_they_are():
    tensors = inputs()
    means = {f"{name}_cmp": compress_mean(tensors[name], 4, 2) for name in "kv"}
    o, indices = native_sparse_attention(**tensors, **SIZES)
    again, same = native_sparse_attention(**tensors, **means, **SIZES)
    assert torch.equal(again, o)
    assert torch.equal(same, indices)
    other, others = native_sparse_attention(**tensors, k_cmp=-means["k_cmp"], v_cmp=means["v_cmp"], **SIZES)
    assert not torch.equal(others, indices)
    assert not torch.equal(other, o)


def test_the_choice_passes_no_gradient():
    tensors = differentiable(inputs())
    k_cmp = compress_mean(tensors["k"], 4, 2)
    assert not choice_scores(tensors["q"], k_cmp, **SCORES).requires_grad
    # With the selected branch alone, windows serve the choice only.
    learned = k_cmp.detach().requires_grad_()
    o, _ = native_sparse_attention(
        **{**tensors, "g_cmp": None, "g_swa": None}, k_cmp=learned, v_cmp=compress_mean(tensors["v"], 4, 2), **SIZES
    )
    assert torch.autograd.grad(o.sum(), learned, allow_unused=True) == (None,)


@pytest.mark.parametrize("left_out", GATES)
def test_a_gate_of_none_leaves_its_branch_out(left_out):
    tensors = inputs()
    zero = {**tensors, left_out: torch.zeros_like(tensors[left_out])}
    expected, indices = native_sparse_attention(**zero, **SIZES)
    o, same = native_sparse_attention(**{**tensors, left_out: None}, **SIZES)
    torch.testing.assert_close(o, expected, rtol=1e-14, atol=1e-14)
    assert same is None if left_out == "g_slc" else torch.equal(same, indices)


def test_without_any_gate_nothing_is_left():
    o, indices = native_sparse_attention(**{**inputs(), **dict.fromkeys(GATES)}, **SIZES)
    assert indices is None
    assert o.shape == (2, 24, 4, 5)
    assert not o.any()


def test_given_choices_are_taken_as_they_are():
    tensors = inputs()
    o, indices = native_sparse_attention(**tensors, **SIZES)
    again, returned = native_sparse_attention(**tensors, **SIZES, block_indices=indices.long())
    assert torch.equal(again, o)
    assert torch.equal(returned, indices)
    assert returned.dtype == torch.int32
    twice = torch.cat([indices.flip(-1), indices], dim=-1)
    assert torch.equal(native_sparse_attention(**tensors, **SIZES, block_indices=twice)[0], o)
    assert not torch.equal(native_sparse_attention(**tensors, **SIZES, block_indices=torch.zeros_like(indices))[0], o)


def test_causal():
    tensors, others = inputs(), inputs(seed=1)
    o, indices = native_sparse_attention(**tensors, **SIZES)
    for t in range(25):
        changed = {name: torch.cat([x[:, :t], others[name][:, t:]], dim=1) for name, x in tensors.items()}
        changed_o, changed_indices = native_sparse_attention(**changed, **SIZES)
        assert torch.equal(changed_o[:, :t], o[:, :t])
        assert torch.equal(changed_indices[:, :t], indices[:, :t])


def test_ties_go_to_the_lower_index():
    tensors = inputs()
    # Windows that do not overlap and are alike give every block that they cover the same score.
    sizes = {**CHOICE, "compress_stride": 4, "init_blocks": 0}
    indices = select_blocks(tensors["q"], torch.zeros(2, 6, 2, 3, dtype=torch.float64), **sizes)
    assert indices[0, 3::4, 0].tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]
    # The windows of blocks 1 and 3 are copies, and better than the rest.
    k_cmp = torch.zeros(2, 6, 2, 3, dtype=torch.float64)
    k_cmp[:, 1::2] = 1.0
    assert select_blocks(torch.ones_like(tensors["q"]), k_cmp, **sizes)[1, 23, 1].tolist() == [1, 3, 5]


def test_forced_blocks_are_chosen_whatever_the_windows_hold():
    q, k_cmp = inputs()["q"], compress_mean(inputs()["k"], 4, 2)
    k_cmp[:, 2], k_cmp[:, 5] = torch.nan, torch.inf
    indices = select_blocks(q, k_cmp, **{**CHOICE, "block_count": 2})
    assert indices[0, :, 0].tolist() == [[0, -1]] * 4 + [[0, t // 4] for t in range(4, 24)]
    assert not choice_scores(q, k_cmp, **SCORES).isnan().any()


def equal_but_for(clean, broken, function, seen, touched):
    """Results and gradients of both runs agree, except for NaN in results that see some (`seen`: a mask by name of the
    result), and except for gradients of what such a result sees too (`touched`: by name of the input, none where it is
    not named).
    """
    results = []
    for tensors in (clean, broken):
        leaves = differentiable(tensors)
        outputs = function(leaves)
        wanted = {name: x for name, x in leaves.items() if torch.is_tensor(x) and x.requires_grad}
        loss = sum(torch.where(seen[name] | ~x.isfinite(), 0.0, x.square()).sum() for name, x in outputs.items())
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        results.append((outputs, dict(zip(wanted, gradients, strict=True))))
    for name, expected in results[0][0].items():
        actual, mask = results[1][0][name], seen[name].expand_as(expected)
        assert actual[mask].isnan().all()
        torch.testing.assert_close(actual[~mask], expected[~mask], rtol=1e-12, atol=1e-12, msg=name)
    for name, expected in results[0][1].items():
        mask = touched.get(name, torch.tensor(False)).expand_as(expected)
        torch.testing.assert_close(results[1][1][name][~mask], expected[~mask], rtol=1e-12, atol=1e-12, msg=f"d{name}")


def test_nan_in_blocks_that_are_not_selected():
    tensors = {name: x for name, x in inputs().items() if name in ("q", "k", "v")}
    indices = torch.tensor([0, 3, -1]).expand(2, 24, 2, 3).clone()
    indices[:, 20:] = -1
    broken = {name: x.clone() for name, x in tensors.items()}
    for name in "kv":
        broken[name][:, 4:12] = torch.nan
        broken[name][:, 16:] = torch.inf
    broken["q"][:, 20:] = torch.nan
    nobody = {name: torch.zeros((), dtype=torch.bool) for name in ("o", "lse")}

    def function(leaves):
        return dict(zip(("o", "lse"), selected_attention(**leaves, block_indices=indices, block_size=4), strict=True))

    equal_but_for(tensors, broken, function, nobody, {})


def test_nan_reaches_what_sees_it_and_nothing_else():
    """Token 10, NaN in k and v: lies in windows 4 and 5 (tokens 8 to 13), in block 2, and in the last three keys of
    tokens 10 to 12.
    """
    clean = inputs()
    broken = {name: x.clone() for name, x in clean.items()}
    for name in "kv":
        broken[name][:, 10] = torch.nan
    indices = torch.tensor([0, 3]).expand(2, 24, 2, 2).clone()
    indices[:, ::2, :, 1] = 2
    token = torch.arange(24)
    # By branch: the queries that see it, and the keys that these see besides.
    sees = {
        "g_cmp": (token >= 11, token >= 0),
        "g_slc": ((token >= 10) & (token % 2 == 0), (token < 4) | (token // 4 == 2)),
        "g_swa": ((token >= 10) & (token <= 12), (token >= 8) & (token <= 12)),
    }
    for gate, (queries, keys) in sees.items():
        only = {name: None for name in GATES if name != gate}

        def function(leaves, only=only):
            return {"o": native_sparse_attention(**{**leaves, **only}, **SIZES, block_indices=indices)[0]}

        rows, others = queries[:, None, None], keys[:, None, None]
        before, after = ({name: tensors[name] for name in ("q", "k", "v", gate)} for tensors in (clean, broken))
        equal_but_for(
            before, after, function, {"o": rows}, {"q": rows, gate: queries[:, None], "k": others, "v": others}
        )


def test_nan_that_a_mask_leaves_out_of_attend():
    clean = attend_inputs()
    # Block 2 is nobody's but its own queries', and what fmask leaves out is garbage.
    clean["fmask"] &= clean["selected_block_indices"] != 2
    clean["fmask"][:, :, 8:12] &= clean["selected_block_indices"][:, :, 8:12] < 2
    broken = {name: x.clone() if torch.is_tensor(x) else x for name, x in clean.items()}
    for name in ("fk", "fv"):
        broken[name][:, :, 8:12] = torch.nan
    broken["sel_scale"][~clean["fmask"]] = torch.nan
    broken["selected_block_indices"][~clean["fmask"]] = 2**40
    token = torch.arange(24)
    own, near = (token >= 8) & (token < 12), (token >= 8) & (token < 16)
    seen = {"o": own[:, None], "o_win": near[:, None], "lse": own, "lse_win": near}
    # Its queries see other keys too: what they choose lies before token 12, and the windows of the queries up to 15
    # reach no further.
    keys = token[:, None] < 16
    touched = {"fq": near[:, None], "fk": keys, "fv": keys, "sel_scale": own[:, None]}

    def function(leaves):
        (o, o_win), (lse, lse_win) = native_sparse_attend(**leaves, return_sliding_window_out=True)
        return {"o": o, "o_win": o_win, "lse": lse, "lse_win": lse_win}

    equal_but_for(clean, broken, function, seen, touched)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_another_sequence_never_reaches_a_result(packed):
    clean = inputs()
    broken = {name: torch.stack([x[0], torch.full_like(x[1], torch.nan)]) for name, x in clean.items()}
    layout, rows = {}, torch.tensor([False, True])[:, None, None, None]
    if packed:
        clean, broken = ({name: x.flatten(0, 1) for name, x in tensors.items()} for tensors in (clean, broken))
        layout, rows = {"cu_seqlens": torch.tensor([0, 24, 48])}, (torch.arange(48) >= 24)[:, None, None]
    touched = {name: rows[..., 0] if name in GATES else rows for name in clean}
    equal_but_for(
        clean,
        broken,
        lambda leaves: {"o": native_sparse_attention(**leaves, **SIZES, **layout)[0]},
        {"o": rows},
        touched,
    )


def test_rows_that_see_nothing_have_gradient_0():
    tensors = differentiable(inputs())
    o, lse = compressed_attention(
        tensors["q"], compress_mean(tensors["k"], 4, 2), compress_mean(tensors["v"], 4, 2), **WINDOWS
    )
    assert (o[:, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    gradients = torch.autograd.grad([o[:, :3].sum(), lse[:, :, :3].sum()], [tensors[name] for name in "qkv"])
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("ends", [None, [0], [0, 0, 0]], ids=str)
def test_no_tokens(ends):
    tensors, layout, lead, lse_shape = inputs(tokens=0), {}, (2, 0), (2, 4, 0)
    if ends is not None:
        tensors, layout, lead, lse_shape = (
            {name: x[0] for name, x in tensors.items()},
            {"cu_seqlens": torch.tensor(ends)},
            (0,),
            (4, 0),
        )
    leaves = differentiable(tensors)
    o, indices = native_sparse_attention(**leaves, **SIZES, **layout)
    assert (o.shape, indices.shape) == ((*lead, 4, 5), (*lead, 2, 3))
    gradients = torch.autograd.grad(o.sum(), list(leaves.values()))
    assert [x.shape for x in gradients] == [x.shape for x in leaves.values()]
    k_cmp = compress_mean(tensors["k"], 4, 2, **layout)
    assert choice_scores(tensors["q"], k_cmp, **SCORES, **layout).shape == (*lead, 2, 0)
    o, lse = selected_attention(tensors["q"], tensors["k"], tensors["v"], indices, block_size=4, **layout)
    assert (o.shape, lse.shape) == ((*lead, 4, 5), lse_shape)


def test_attend_over_nothing():
    (o, o_win), (lse, lse_win) = native_sparse_attend(
        **attend_inputs(tokens=1, selected=0), return_sliding_window_out=True
    )
    assert torch.equal(o, o_win)
    assert torch.equal(lse, lse_win)
    tensors = attend_inputs()
    tensors = {name: x[:, :, :0] if torch.is_tensor(x) else x for name, x in tensors.items()}
    o, lse = native_sparse_attend(**tensors)
    assert (o.shape, lse.shape) == ((2, 4, 0, 5), (2, 4, 0))


def test_16_bits_are_computed_in_fp32():
    tensors = {name: x.bfloat16() for name, x in inputs().items()}
    wide = {name: x.float() for name, x in tensors.items()}
    o, indices = native_sparse_attention(**tensors, **SIZES)
    wide_o, wide_indices = native_sparse_attention(**wide, **SIZES)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, wide_o.bfloat16())
    assert torch.equal(indices, wide_indices)
    # Gates may come in fp32.
    assert torch.equal(native_sparse_attention(**{**tensors, **{name: wide[name] for name in GATES}}, **SIZES)[0], o)
    for all_of in (tensors, wide):
        all_of["k_cmp"] = compress_mean(tensors["k"], 4, 2).to(all_of["k"].dtype)
    scores = choice_scores(tensors["q"], tensors["k_cmp"], **SCORES)
    assert (scores.dtype, tensors["k_cmp"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(scores, choice_scores(wide["q"], wide["k_cmp"], **SCORES))
    attend = {
        name: x.to(torch.bfloat16) if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in attend_inputs().items()
    }
    o, lse = native_sparse_attend(**attend)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compute_dtype_is_the_precision_of_every_step(dtype):
    tensors = {name: x.to(dtype) for name, x in inputs().items()}
    exact, indices = native_sparse_attention(**{name: x.double() for name, x in tensors.items()}, **SIZES)
    o, _ = native_sparse_attention(**tensors, **SIZES, compute_dtype=dtype, block_indices=indices)
    error = (o.double() - exact).abs().max().item()
    assert o.dtype == dtype
    assert torch.finfo(dtype).eps / 8 < error < 100 * torch.finfo(dtype).eps
    scores = choice_scores(tensors["q"], compress_mean(tensors["k"], 4, 2), **SCORES, compute_dtype=dtype)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, scores.to(dtype).float())
