"""The reference against brute force over Python numbers, one loop a token, and against numerical derivatives."""

import itertools
import math

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

# Sizes of native_sparse_attention that differ from SIZES.
CASES = {
    "plain": {},
    "windows-that-do-not-overlap": {"compress_size": 2},
    "windows-wider-than-blocks": {"compress_size": 8, "block_size": 2},
    "windows-of-one": {"compress_size": 1, "compress_stride": 1},
    "no-window-fits": {"compress_size": 32, "block_size": 32},
    "one-window": {"compress_size": 18},
    "no-forced-start": {"init_blocks": 0, "local_blocks": 2},
    "nothing-forced": {"init_blocks": 0, "local_blocks": 0, "block_count": 2},
    "all-forced": {"init_blocks": 1, "local_blocks": 2},
    "only-the-own-block": {"init_blocks": 0, "local_blocks": 1, "block_count": 1},
    "more-than-there-are": {"block_count": 9},
    "blocks-of-two": {"block_size": 2, "block_count": 4},
    "scale": {"scale": 2.5},
    "negative-scale": {"scale": -0.7},
    "zero-scale": {"scale": 0.0},
    "window-of-one": {"window_size": 1},
    "window-of-all": {"window_size": 100},
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(tokens=19, heads=4, kv_heads=2, channels=3, values=5, batch=2):
    """q, k, v and the gates by name."""
    shapes = {"q": (heads, channels), "k": (kv_heads, channels), "v": (kv_heads, values)} | dict.fromkeys(
        GATES, (heads,)
    )
    return {name: random(batch, tokens, *rest, seed=seed) for seed, (name, rest) in enumerate(shapes.items())}


def packed(tensors):
    """The first of the batch, as a packed batch."""
    return {name: x[0] for name, x in tensors.items()}


def window_count(tokens, size, stride):
    return max(0, (tokens - size) // stride + 1)


def softmax(weights):
    """Of the scores in a list of (score, value): probabilities with their values, and LSE."""
    if not weights:
        return [], -math.inf
    largest = max(score for score, _ in weights)
    total = sum(math.exp(score - largest) for score, _ in weights)
    return [(math.exp(score - largest) / total, value) for score, value in weights], largest + math.log(total)


def attended(q, keys, values, scale, seen, channels):
    """One query: q [D], keys and values as lists of rows, and which of them it sees, each as often as it is named -> o
    [Dv], lse.
    """
    scored = [(scale * sum(a * b for a, b in zip(q, keys[j], strict=True)), values[j]) for j in seen]
    weighted, lse = softmax(scored)
    return [sum(p * value[d] for p, value in weighted) for d in range(channels)], lse


class BruteForce:
    """One sequence, as nested lists, straight from the definition."""

    def __init__(self, q, k, v, scale=None):
        self.q, self.k, self.v = q, k, v
        self.tokens, self.heads, self.kv_heads = len(q), len(q[0]), len(k[0])
        self.scale = len(q[0][0]) ** -0.5 if scale is None else scale

    def rows(self, x, h):
        """Rows of the kv head that query head h reads."""
        return [token[h // (self.heads // self.kv_heads)] for token in x]

    def attend(self, t, h, k, v, seen):
        return attended(self.q[t][h], self.rows(k, h), self.rows(v, h), self.scale, seen, len(self.v[0][0]))

    def means(self, x, size, stride):
        windows = range(window_count(self.tokens, size, stride))
        return [
            [
                [sum(x[c * stride + i][h][d] for i in range(size)) / size for d in range(len(x[0][0]))]
                for h in range(self.kv_heads)
            ]
            for c in windows
        ]

    def visible(self, t, size, stride):
        return [c for c in range(window_count(self.tokens, size, stride)) if c * stride + size - 1 <= t]

    def block_scores(self, t, g, k_cmp, size, stride, block_size):
        """Of the blocks up to the query's own."""
        group = self.heads // self.kv_heads
        scores = [0.0] * (t // block_size + 1)
        for h in range(g * group, (g + 1) * group):
            seen = self.visible(t, size, stride)
            weighted, _ = softmax(
                [(self.scale * sum(a * b for a, b in zip(self.q[t][h], k_cmp[c][g], strict=True)), c) for c in seen]
            )
            for p, c in weighted:
                # A token at a time: it adds p / stride to the block it lies in.
                for token in range(c * stride, c * stride + size):
                    scores[token // block_size] += p / stride
        return scores

    def chosen(self, t, g, k_cmp, compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks):
        scores = self.block_scores(t, g, k_cmp, compress_size, compress_stride, block_size)
        current = t // block_size
        forced = [j for j in range(current + 1) if j < init_blocks or j > current - local_blocks]
        # Rounded, for sums that are equal on paper may differ in the last bit.
        ranked = sorted((j for j in range(current + 1) if j not in forced), key=lambda j: (-round(scores[j], 12), j))
        return sorted((forced + ranked)[:block_count])


def by_token(sequence, result):
    """o [T, H, Dv] and lse [H, T] from result(t, h) -> (o, lse)."""
    results = [[result(t, h) for h in range(sequence.heads)] for t in range(sequence.tokens)]
    o = torch.tensor([[head[0] for head in token] for token in results], dtype=torch.float64)
    return o, torch.tensor([[head[1] for head in token] for token in results], dtype=torch.float64).T


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_brute_force(options):
    tensors, sizes = inputs(), {**SIZES, **options}
    scale, window_size = sizes.pop("scale", None), sizes.pop("window_size")
    windows = {name: sizes[name] for name in WINDOWS}
    size, stride = windows.values()
    o, block_indices = native_sparse_attention(**tensors, **sizes, window_size=window_size, scale=scale)
    assert (block_indices.shape, block_indices.dtype) == ((2, 19, 2, sizes["block_count"]), torch.int32)
    k_cmp, v_cmp = (compress_mean(tensors[name], size, stride) for name in "kv")
    o_cmp, lse_cmp = compressed_attention(tensors["q"], k_cmp, v_cmp, **windows, scale=scale)
    for b in range(2):
        q, k, v, g_cmp, g_slc, g_swa = (x[b].tolist() for x in tensors.values())
        sequence = BruteForce(q, k, v, scale)
        means = [sequence.means(x, size, stride) for x in (k, v)]
        for actual, expected in zip((k_cmp, v_cmp), means, strict=True):
            assert actual.shape[1] == len(expected)
            close(actual[b], torch.tensor(expected, dtype=torch.float64).view(actual[b].shape))
        compressed = by_token(sequence, lambda t, h: sequence.attend(t, h, *means, sequence.visible(t, size, stride)))  # noqa: B023
        close(o_cmp[b], compressed[0])
        close(lse_cmp[b], compressed[1])
        for t in range(19):
            for h in range(4):
                chosen = sequence.chosen(t, h // 2, means[0], **sizes)
                assert block_indices[b, t, h // 2].tolist() == chosen + [-1] * (sizes["block_count"] - len(chosen))
                slc, _ = sequence.attend(t, h, k, v, [j for j in range(t + 1) if j // sizes["block_size"] in chosen])
                swa, _ = sequence.attend(t, h, k, v, [j for j in range(t + 1) if j > t - window_size])
                branches = zip(compressed[0][t, h].tolist(), slc, swa, strict=True)
                expected = [g_cmp[t][h] * x + g_slc[t][h] * y + g_swa[t][h] * z for x, y, z in branches]
                close(o[b, t, h], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_choice_scores(options):
    q, k = (inputs()[name] for name in "qk")
    sizes = {**CHOICE, **{name: x for name, x in options.items() if name != "window_size"}}
    scale, block_count, block_size = sizes.pop("scale", None), sizes.pop("block_count"), sizes["block_size"]
    k_cmp = compress_mean(k, sizes["compress_size"], sizes["compress_stride"])
    scores = choice_scores(q, k_cmp, **sizes, scale=scale)
    assert scores.shape == (2, 19, 2, -(-19 // block_size))
    for b, t, g in itertools.product(range(2), range(19), range(2)):
        sequence = BruteForce(q[b].tolist(), k[b].tolist(), k[b].tolist(), scale)
        means = sequence.means(sequence.k, sizes["compress_size"], sizes["compress_stride"])
        expected = sequence.block_scores(t, g, means, sizes["compress_size"], sizes["compress_stride"], block_size)
        expected[: sizes["init_blocks"]] = [math.inf] * len(expected[: sizes["init_blocks"]])
        for j in range(max(0, len(expected) - sizes["local_blocks"]), len(expected)):
            expected[j] = math.inf
        expected += [-math.inf] * (scores.shape[-1] - len(expected))
        close(scores[b, t, g], torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(
        select_blocks(q, k_cmp, **sizes, scale=scale, block_count=block_count),
        native_sparse_attention(**inputs(), **sizes, scale=scale, block_count=block_count)[1],
    )


def given_indices(tokens=19, selected=4, block_size=4, seed=0):
    """[2, T, 2, S] from -2 to past the last block: repeated, negative, out of order, later than the query, beyond the
    sequence.
    """
    most = -(-tokens // block_size) + 2
    return torch.randint(-2, most, (2, tokens, 2, selected), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("block_size", "scale"), [(4, None), (5, -0.7), (1, 0.0), (32, 2.5)])
def test_selected_brute_force(block_size, scale, dtype):
    q, k, v = (inputs()[name] for name in "qkv")
    indices = given_indices(block_size=block_size).to(dtype)
    indices[:, 3] = -1
    o, lse = selected_attention(q, k, v, indices, block_size=block_size, scale=scale)
    assert (o[:, 3] == 0).all()
    assert (lse[:, :, 3] == -torch.inf).all()
    for b in range(2):
        sequence = BruteForce(*(x[b].tolist() for x in (q, k, v)), scale)

        def result(t, h, b=b, sequence=sequence):
            seen = [j for j in range(t + 1) if j // block_size in indices[b, t, h // 2].tolist()]
            return sequence.attend(t, h, sequence.k, sequence.v, seen)

        for actual, expected in zip((o[b], lse[b]), by_token(sequence, result), strict=True):
            close(actual, expected)


def attend_inputs(tokens=19, selected=3, per_query_head=False, block_size=4):
    """Everything of native_sparse_attend: [B, H, T, ...]."""
    tensors = inputs(tokens)
    fq, fk, fv = (tensors[name].transpose(1, 2) for name in "qkv")
    shape = (2, 4 if per_query_head else 2, tokens, selected)
    generator = torch.Generator().manual_seed(7)
    indices = torch.randint(0, -(-tokens // block_size), shape, generator=generator)
    fmask = torch.rand(shape, generator=generator) < 0.7
    sel_scale = torch.randn(shape, generator=generator, dtype=torch.float64)
    sel_scale.view(-1)[::5] = 0.0
    return {"fq": fq, "fk": fk, "fv": fv, "selected_block_indices": indices, "fmask": fmask, "sel_scale": sel_scale}


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "selected-only"])
@pytest.mark.parametrize(("per_query_head", "block_size"), [(False, 4), (True, 4), (False, 32), (True, 1)])
def test_attend_brute_force(per_query_head, block_size, own, scaled):
    tensors = attend_inputs(per_query_head=per_query_head, block_size=block_size)
    if not scaled:
        tensors["sel_scale"] = None
    (o, o_win), (lse, lse_win) = native_sparse_attend(
        **tensors, block_size=block_size, include_block_causal=own, return_sliding_window_out=True
    )
    alone = native_sparse_attend(**tensors, block_size=block_size, include_block_causal=own)
    assert torch.equal(alone[0], o)
    assert torch.equal(alone[1], lse)
    scale, group = 3**-0.5, 1 if per_query_head else 2
    for b, h in itertools.product(range(2), range(4)):
        q, k, v = tensors["fq"][b, h].tolist(), tensors["fk"][b, h // 2].tolist(), tensors["fv"][b, h // 2].tolist()
        for t in range(19):
            at = (b, h // group, t)
            scored = []
            for s in range(3):
                if tensors["fmask"][at][s]:
                    block = tensors["selected_block_indices"][at][s].item()
                    factor = tensors["sel_scale"][at][s].item() if scaled else 1.0
                    for j in range(block * block_size, min(19, (block + 1) * block_size)):
                        scored.append((sum(x * y for x, y in zip(q[t], k[j], strict=True)) * factor * scale, v[j]))
            near = []
            for j in range(t + 1):
                score = sum(x * y for x, y in zip(q[t], k[j], strict=True)) * scale
                scored += [(score, v[j])] if own and j >= t // block_size * block_size else []
                near += [(score, v[j])] if j >= t - block_size else []
            for actual, actual_lse, keys in ((o, lse, scored), (o_win, lse_win, near)):
                weighted, expected_lse = softmax(keys)
                expected = [sum(p * value[d] for p, value in weighted) for d in range(5)]
                close(actual[b, h, t], torch.tensor(expected, dtype=torch.float64))
                assert math.isclose(actual_lse[b, h, t].item(), expected_lse, abs_tol=1e-10)


@pytest.mark.parametrize("index", [-1, -(2**40), 5, 2**60], ids=str)
def test_attend_ignores_an_index_that_names_no_block(index):
    tensors = attend_inputs()
    tensors["fmask"] |= True
    wrong = torch.full_like(tensors["selected_block_indices"], index)
    leaf = tensors["sel_scale"].requires_grad_()
    o, lse = native_sparse_attend(**{**tensors, "selected_block_indices": wrong}, block_size=4)
    own_o, own_lse = native_sparse_attend(**{**tensors, "fmask": torch.zeros_like(tensors["fmask"])}, block_size=4)
    assert torch.equal(o, own_o)
    assert torch.equal(lse, own_lse)
    assert not torch.autograd.grad(o.square().sum(), leaf)[0].any()


def check_gradients(function, tensors):
    """Every output, where it is finite, along every input, against numerical derivatives, in random directions: it is
    quick, and misses nothing.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}

    def finite(*values):
        return tuple(x[x.isfinite()] for x in function(**dict(zip(leaves, values, strict=True))))

    assert torch.autograd.gradcheck(finite, tuple(leaves.values()), fast_mode=True)


SMALL = {"tokens": 7, "heads": 4, "kv_heads": 2, "channels": 2, "values": 3, "batch": 1}
LAYOUTS = pytest.mark.parametrize("ends", [None, [0, 0, 5, 5, 7]], ids=["dense", "packed"])


def laid_out(tensors, ends):
    return (tensors, {}) if ends is None else (packed(tensors), {"cu_seqlens": torch.tensor(ends)})


@LAYOUTS
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (4, 2), (3, 1), (8, 4)])
def test_gradcheck_of_means(size, stride, ends):
    tensors, layout = laid_out({"x": inputs(**SMALL)["k"]}, ends)
    check_gradients(lambda x: (compress_mean(x, size, stride, **layout),), tensors)


@LAYOUTS
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_gradcheck_compressed(scale, ends):
    windows = {"compress_size": 2, "compress_stride": 1}
    tensors, layout = laid_out({name: x for name, x in inputs(**SMALL).items() if name in ("q", "k", "v")}, ends)
    k_cmp, v_cmp = (compress_mean(tensors.pop(name), 2, 1, **layout) for name in "kv")
    assert k_cmp.shape[-3] == (6 if ends is None else 5)
    check_gradients(
        lambda **x: compressed_attention(**x, **windows, **layout, scale=scale),
        {**tensors, "k_cmp": k_cmp, "v_cmp": v_cmp},
    )


@LAYOUTS
@pytest.mark.parametrize("scale", [None, -0.7, 0.0])
def test_gradcheck_selected(scale, ends):
    tensors = {name: x for name, x in inputs(**SMALL).items() if name in ("q", "k", "v")}
    indices = given_indices(tokens=7, selected=3, block_size=2)[:1]
    indices[:, 4] = -1
    tensors, layout = laid_out(tensors, ends)
    indices = indices if ends is None else indices[0]
    check_gradients(
        lambda **x: selected_attention(**x, block_indices=indices, block_size=2, scale=scale, **layout), tensors
    )


@LAYOUTS
@pytest.mark.parametrize("learned", [False, True], ids=["means", "learned"])
@pytest.mark.parametrize("without", [(), ("g_cmp",), ("g_slc",), ("g_swa",)], ids=str)
def test_gradcheck_attention(without, learned, ends):
    sizes = {
        "compress_size": 2,
        "compress_stride": 1,
        "block_size": 2,
        "block_count": 2,
        "init_blocks": 0,
        "local_blocks": 1,
        "window_size": 2,
    }
    tensors, layout = laid_out({name: x for name, x in inputs(**SMALL).items() if name not in without}, ends)
    if learned:
        tensors |= {f"{name}_cmp": compress_mean(tensors[name], 2, 1, **layout) + 1 for name in "kv"}
    given = dict.fromkeys(without) | layout | sizes
    # The choice is held, for a derivative has none where it changes.
    indices = native_sparse_attention(**tensors, **given)[1]
    check_gradients(lambda **x: native_sparse_attention(**x, **given, block_indices=indices)[:1], tensors)


@pytest.mark.parametrize("own", [True, False], ids=["own", "selected-only"])
@pytest.mark.parametrize(("per_query_head", "block_size"), [(False, 2), (True, 3), (False, 8)])
def test_gradcheck_attend(per_query_head, block_size, own):
    tensors = {
        name: x[:1]
        for name, x in attend_inputs(tokens=5, selected=2, per_query_head=per_query_head, block_size=block_size).items()
    }
    assert (tensors["sel_scale"] < 0).any()
    assert (tensors["sel_scale"] == 0).any()
    given = {name: tensors.pop(name) for name in ("selected_block_indices", "fmask")}
    if not own:
        given["fmask"][:, :, 2] = False

    def flat(**x):
        o, lse = native_sparse_attend(
            **x, **given, block_size=block_size, include_block_causal=own, return_sliding_window_out=True
        )
        return (*o, *lse)

    check_gradients(flat, tensors)
