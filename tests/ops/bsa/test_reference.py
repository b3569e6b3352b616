"""The reference against brute force over Python numbers, and against numerical derivatives."""

import itertools
import math

import pytest
import torch

from tilewise.ops.bsa.reference import block_sparse_attn, choice_scores

NAMES = ("q", "k", "v", "u", "g_cmp", "g_slc", "g_swa")

CASES = {
    "plain": {},
    "window": {"window_size": 3},
    "window-of-one": {"window_size": 1},
    "window-of-all": {"window_size": 100},
    "each-head-chooses": {"interleave": False},
    "scale": {"scale": 2.5, "window_size": 2},
    "only-the-own-block": {"block_counts": 1},
    "every-block": {"block_counts": 100},
    "blocks-of-one": {"block_size": 1, "block_counts": 3},
    "shorter-than-a-block": {"block_size": 16},
    "one-whole-block": {"block_size": 11},
}


def inputs(tokens=11, heads=4, channels=3, values=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, heads)
    shapes = [(*shape, channels)] * 2 + [(*shape, values)] * 2 + [shape] * 3
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def attend(tensors, **options):
    return block_sparse_attn(*tensors, **{"block_counts": 2, "block_size": 3, **options})


def layer_norm(gated):
    """Of one token's [H][Dv] numbers, all together."""
    numbers = [x for head in gated for x in head]
    mean = sum(numbers) / len(numbers)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers) + 1e-6)
    return [[(x - mean) / deviation for x in head] for head in gated]


def brute_force(
    q, k, v, u, g_cmp, g_slc, g_swa, block_counts=2, block_size=3, window_size=0, scale=None, interleave=True
):
    """One sequence (q, k [T][H][D], and so on, as lists), straight from the definition."""
    tokens, heads, channels, values = len(q), len(q[0]), len(q[0][0]), len(v[0][0])
    scale = channels**-0.5 if scale is None else scale
    most = min(block_counts, math.ceil(tokens / block_size))

    def mean(x, block, h, d):
        return sum(x[j][h][d] for j in range(block * block_size, (block + 1) * block_size)) / block_size

    def activated(t, h, key):
        s = scale * sum(q[t][h][d] * key[d] for d in range(channels))
        return s / (1 + math.exp(-s)) / scale

    def block_score(t, h, block):
        return activated(t, h, [mean(k, block, h, d) for d in range(channels)])

    def chosen_by(t, h):
        current = t // block_size
        ranked = sorted(range(current), key=lambda block: (-block_score(t, h, block), block))
        return sorted([*ranked[: most - 1], current])

    o, choices = [], [[] for _ in range(heads)]
    for t in range(tokens):
        o_cmp, o_slc, o_swa = ([[0.0] * values for _ in range(heads)] for _ in range(3))
        for h in range(heads):
            for block in range(tokens // block_size):
                if (block + 1) * block_size - 1 <= t:
                    for d in range(values):
                        o_cmp[h][d] += g_cmp[t][h] * block_score(t, h, block) * mean(v, block, h, d)
            chosen = chosen_by(t, h - h % 2 if interleave else h)
            choices[h].append(chosen + [-1] * (most - len(chosen)))
            for j in range(t + 1):
                for d in range(values):
                    if j // block_size in chosen:
                        o_slc[h][d] += g_slc[t][h] * activated(t, h, k[j][h]) * v[j][h][d]
                    if j > t - window_size:
                        o_swa[h][d] += g_swa[t][h] * activated(t, h, k[j][h]) * v[j][h][d]
        branches = [layer_norm(o_cmp), layer_norm(o_slc)] + ([layer_norm(o_swa)] if window_size else [])
        o.append([[u[t][h][d] * sum(branch[h][d] for branch in branches) for d in range(values)] for h in range(heads)])
    return o, choices


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_brute_force(options):
    tensors = inputs()
    o, block_indices = attend(tensors, **options)
    assert block_indices.dtype == torch.int32
    for b in range(2):
        expected_o, expected_choices = brute_force(*(x[b].tolist() for x in tensors), **options)
        torch.testing.assert_close(o[b], torch.tensor(expected_o, dtype=torch.float64), rtol=1e-10, atol=1e-10)
        assert block_indices[b].tolist() == expected_choices


@pytest.mark.parametrize(
    "options", [{"window_size": 2}, {"block_size": 16}, {"scale": 2.5, "interleave": False}], ids=str
)
@pytest.mark.parametrize("ends", [None, [0, 4, 4, 5]], ids=["dense", "packed"])
def test_gradcheck(options, ends):
    tensors = inputs(tokens=5, heads=2, batch=1)
    if ends is not None:
        options = {**options, "seq_offsets": torch.tensor(ends)}
        tensors = [x[0] for x in tensors]
    options = {"block_size": 2, **options}
    block_indices = attend(tensors, **options)[1]
    assert torch.autograd.gradcheck(
        lambda *x: attend(x, **options, block_indices=block_indices)[0], [x.requires_grad_() for x in tensors]
    )


def test_the_choice_passes_no_gradient():
    q, k = (x.requires_grad_() for x in inputs()[:2])
    assert not choice_scores(q, k, block_size=3).requires_grad
    assert not attend([q, k, *inputs()[2:]])[1].requires_grad


def test_causal():
    tensors, others = inputs(), inputs(seed=1)
    o, block_indices = attend(tensors, window_size=4)
    for t in range(12):
        changed = [torch.cat([x[:, :t], y[:, t:]], dim=1) for x, y in zip(tensors, others, strict=True)]
        changed_o, changed_indices = attend(changed, window_size=4)
        assert torch.equal(changed_o[:, :t], o[:, :t])
        assert torch.equal(changed_indices[:, :, :t], block_indices[:, :, :t])


def test_interleave_gives_the_even_heads_choice_to_the_odd():
    tensors = inputs(tokens=30)
    own, shared = attend(tensors, interleave=False)[1], attend(tensors)[1]
    assert not torch.equal(own[:, 0], own[:, 1])
    for h in range(4):
        assert torch.equal(shared[:, h], own[:, h - h % 2])


def test_given_choices_are_taken_as_they_are():
    tensors = inputs(tokens=30)
    o, block_indices = attend(tensors, interleave=False)
    again, returned = attend(tensors, block_indices=block_indices.long())
    assert torch.equal(again, o)
    assert torch.equal(returned, block_indices)
    assert returned.dtype == torch.int32
    twice = torch.cat([block_indices.flip(-1), block_indices], dim=-1)
    assert torch.equal(attend(tensors, block_indices=twice)[0], o)
    assert not torch.equal(attend(tensors, block_indices=torch.zeros_like(block_indices))[0], o)


@pytest.mark.parametrize("options", [{}, {"window_size": 3}, {"block_counts": 5}], ids=str)
def test_packed_is_each_sequence_alone(options):
    tensors = [x[0].requires_grad_() for x in inputs(tokens=24)]
    ends = [0, 0, 9, 11, 11, 24]
    offsets = torch.tensor(ends, dtype=torch.int32)
    o, block_indices = attend(tensors, seq_offsets=offsets, **options)
    scores = choice_scores(*tensors[:2], block_size=3, seq_offsets=offsets)
    count = options.get("block_counts", 2)
    assert (o.shape, block_indices.shape, scores.shape) == ((24, 4, 2), (4, 24, count), (4, 24, 5))
    for start, end in itertools.pairwise(ends):
        alone = [x[None, start:end] for x in tensors]
        alone_o, alone_indices = attend(alone, **options)
        alone_scores = choice_scores(*alone[:2], block_size=3)
        most = alone_indices.shape[-1]
        assert most == min(count, -(-(end - start) // 3))
        assert torch.equal(o[start:end], alone_o[0])
        assert torch.equal(block_indices[:, start:end, :most], alone_indices[0])
        assert (block_indices[:, start:end, most:] == -1).all()
        assert torch.equal(scores[:, start:end, : alone_scores.shape[-1]], alone_scores[0])
        assert (scores[:, start:end, alone_scores.shape[-1] :] == -torch.inf).all()
    given, _ = attend(tensors, seq_offsets=offsets, block_indices=block_indices, **options)
    assert torch.equal(given, o)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_another_sequence_never_reaches_a_result(packed):
    clean = inputs(tokens=10)
    beside_nan = [torch.stack([x[0], torch.full_like(x[1], torch.nan)]) for x in clean]
    layout, mine = {}, 0
    if packed:
        clean, beside_nan = ([x.flatten(0, 1) for x in tensors] for tensors in (clean, beside_nan))
        layout, mine = {"seq_offsets": torch.tensor([0, 10, 20])}, slice(0, 10)
    results = []
    for tensors in (clean, beside_nan):
        leaves = [x.requires_grad_() for x in tensors]
        o = attend(leaves, window_size=4, **layout)[0][mine]
        results.append([o, *(gradient[mine] for gradient in torch.autograd.grad(o.square().sum(), leaves))])
    for expected, actual in zip(*results, strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_no_sequence_at_all():
    tensors = [x[0, :0].requires_grad_() for x in inputs()]
    for offsets in ([0], [0, 0, 0]):
        o, block_indices = attend(tensors, seq_offsets=torch.tensor(offsets), window_size=2)
        assert (o.shape, block_indices.shape) == ((0, 4, 2), (4, 0, 2))
        assert all(
            gradient.shape == x.shape
            for gradient, x in zip(torch.autograd.grad(o.sum(), tensors), tensors, strict=True)
        )
    assert choice_scores(*tensors[:2], block_size=3, seq_offsets=torch.tensor([0])).shape == (4, 0, 0)


def test_no_tokens():
    o, block_indices = attend(inputs(tokens=0))
    assert (o.shape, block_indices.shape) == ((2, 0, 4, 2), (2, 4, 0, 0))


def test_ties_go_to_the_lower_index():
    q, k, *rest = inputs(tokens=30)
    chosen = attend([q, torch.zeros_like(k), *rest], block_counts=3)[1]
    assert chosen[0, 0, ::3].tolist() == [[0, -1, -1], [0, 1, -1]] + [[0, 1, block] for block in range(2, 10)]
    # Blocks 1, 4 and 7 are copies, and better than the rest.
    q, k = torch.ones_like(q), torch.zeros_like(k)
    for block in (1, 4, 7):
        k[:, 3 * block : 3 * block + 3] = torch.tensor([0.3, 0.1, 0.7], dtype=k.dtype)[:, None, None]
    assert attend([q, k, *rest], block_counts=3)[1][1, 3, -1].tolist() == [1, 4, 9]


def test_blocks_rank_by_score_not_by_product():
    """SiLU falls before it rises: a product of -1 scores below one of -20."""
    q, k, *rest = inputs(tokens=9, channels=1)
    k[:, 0:3], k[:, 3:6] = -1.0, -20.0
    assert attend([torch.ones_like(q), k, *rest])[1][0, 0, -1].tolist() == [1, 2]


def test_choice_scores():
    q, k = inputs(tokens=8, heads=2)[:2]
    scores = choice_scores(q, k, block_size=3)
    assert scores.shape == (2, 2, 8, 3)
    for t in range(8):
        assert (scores[:, :, t, t // 3] == torch.inf).all()
        assert (scores[:, :, t, t // 3 + 1 :] == -torch.inf).all()
        for c in range(t // 3):
            s = torch.einsum("bhd,bhd->bh", q[:, t], k[:, 3 * c : 3 * c + 3].mean(1)) / 3**0.5
            torch.testing.assert_close(scores[:, :, t, c], s * s.sigmoid() * 3**0.5, rtol=1e-12, atol=1e-12)


def test_the_own_block_is_chosen_whatever_the_others_hold():
    q, k, *rest = inputs(tokens=12)
    k[:, 0:3], k[:, 3:6] = torch.nan, torch.inf
    scores = choice_scores(q, k, block_size=3)
    assert (scores[:, :, 6:, :2].isfinite()).all()
    assert attend([q, k, *rest], block_counts=1)[1][0, 0].flatten().tolist() == [t // 3 for t in range(12)]


def test_window_0_leaves_the_branch_out():
    tensors = [x.requires_grad_() for x in inputs()]
    o, _ = attend(tensors)
    assert torch.equal(attend([*tensors[:6], torch.full_like(tensors[6], torch.nan)])[0], o)
    assert torch.autograd.grad(o.sum(), tensors[6], allow_unused=True) == (None,)
    assert not torch.allclose(attend(tensors, window_size=4)[0], o)


@pytest.mark.parametrize("at", [4, 5, 6], ids=NAMES[4:])
def test_a_gate_of_none_is_1(at):
    tensors = inputs()
    tensors[at] = torch.ones_like(tensors[at])
    expected, _ = attend(tensors, window_size=4)
    tensors[at] = None
    assert torch.equal(attend(tensors, window_size=4)[0], expected)


def test_rows_that_see_no_block_give_0_and_gradient_0():
    """With the other branch gated off, nothing is left before the first block ends: LN(0) = 0."""
    tensors = inputs()
    tensors[5] = torch.zeros_like(tensors[5])
    leaves = [x.requires_grad_() for x in tensors]
    o, _ = attend(leaves)
    assert (o[:, :2] == 0).all()
    assert (o[:, 2] != 0).any()
    gradients = torch.autograd.grad(o[:, :2].sum(), leaves, allow_unused=True)
    for name, gradient in zip(NAMES, gradients, strict=True):
        if name == "g_slc":
            # LN of a gated zero still has a slope along its gate.
            assert gradient.isfinite().all()
        elif gradient is not None:
            assert (gradient == 0).all(), name


def test_16_bits_are_computed_in_fp32():
    tensors = [x.bfloat16() for x in inputs(tokens=30)]
    wide = [x.float() for x in tensors]
    o, block_indices = attend(tensors, window_size=4)
    wide_o, wide_indices = attend(wide, window_size=4)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, wide_o.bfloat16())
    assert torch.equal(block_indices, wide_indices)
    # u and the gates may come in fp32.
    assert torch.equal(attend(tensors[:3] + wide[3:], window_size=4)[0], o)
    scores = choice_scores(*tensors[:2], block_size=3)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, choice_scores(*wide[:2], block_size=3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compute_dtype_is_the_precision_of_every_step(dtype):
    tensors = [x.to(dtype) for x in inputs(tokens=30)]
    exact, block_indices = attend([x.double() for x in tensors], window_size=4)
    o, _ = attend(tensors, window_size=4, compute_dtype=dtype, block_indices=block_indices)
    error = (o.double() - exact).abs().max().item()
    assert o.dtype == dtype
    assert torch.finfo(dtype).eps / 8 < error < 100 * torch.finfo(dtype).eps
    scores = choice_scores(*tensors[:2], block_size=3, compute_dtype=dtype)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, scores.to(dtype).float())
    assert not torch.equal(scores, choice_scores(*tensors[:2], block_size=3))
