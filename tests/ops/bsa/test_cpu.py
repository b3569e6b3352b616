"""The CPU backend against the reference in fp64, and what must not matter to it: chunks, packing, strides, the run,
torch's defaults.
"""

import itertools

import pytest
import torch
from bsa_inputs import GATES, LENGTHS, assert_close, cumulative, differentiate, inputs

from tilewise import block_sparse_attn
from tilewise.ops.bsa import reference
from tilewise.ops.nsa import cpu_tiles

SMALL = {"block_counts": 3, "block_size": 8}
CASES = {
    "plain": {},
    "window": {"window_size": 9},
    "window-of-one": {"window_size": 1},
    "window-of-all": {"window_size": 2**40},
    "each-head": {"interleave": False},
    "scale": {"scale": 1.5, "window_size": 9},
    "own-block": {"block_counts": 1},
    "every-block": {"block_counts": 100},
    "blocks-of-one": {"block_size": 1, "block_counts": 5},
    "odd-blocks": {"block_size": 13},
    "long-blocks": {"block_size": 200},
    "no-gates": {"gates": (), "window_size": 9},
    "one-gate": {"gates": ("g_slc",), "window_size": 9},
    "odd-heads": {"heads": 5, "interleave": False},
    "narrow": {"channels": 1, "values": 1},
    "packed": {"packed": True, "window_size": 9},
    "packed-each-head": {"packed": True, "interleave": False, "block_counts": 9},
    "no-tokens": {"tokens": 0, "window_size": 9},
    "no-batch": {"batch": 0},
}
SHAPES = ("gates", "heads", "channels", "values", "packed", "tokens", "batch")


def case(name):
    given = CASES[name]
    options = SMALL | {key: value for key, value in given.items() if key not in SHAPES}
    if given.get("packed"):
        options["seq_offsets"] = cumulative(LENGTHS)
    return inputs(**{key: value for key, value in given.items() if key in SHAPES}), options


def on_cpu(options):
    return lambda **x: block_sparse_attn(**x, **options, backend="cpu")


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name):
    tensors, options = case(name)
    actual = differentiate(on_cpu(options), tensors)
    wide = {name: None if x is None else x.double() for name, x in tensors.items()}
    expected = differentiate(lambda **x: reference.block_sparse_attn(**x, **options), wide)
    assert actual[1].dtype == torch.int32
    assert torch.equal(actual[1], expected[1])
    assert_close(actual, expected, tolerance=5e-5)
    assert all(x.is_contiguous() for x in actual)


def test_packed_is_each_sequence_alone():
    tensors, options = case("packed")
    o, block_indices = on_cpu(options)(**tensors)
    alone_options = {name: value for name, value in options.items() if name != "seq_offsets"}
    for start, end in itertools.pairwise(cumulative(LENGTHS).tolist()):
        alone, chosen = on_cpu(alone_options)(**{name: x[None, start:end] for name, x in tensors.items()})
        slots = chosen.shape[-1]
        torch.testing.assert_close(o[start:end], alone[0], rtol=1e-5, atol=1e-5)
        assert torch.equal(block_indices[:, start:end, :slots], chosen[0])
        assert (block_indices[:, start:end, slots:] == -1).all()


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_packed_without_tokens(offsets):
    tensors = {name: x[:0] for name, x in inputs(packed=True).items()}
    o, block_indices, *gradients = differentiate(
        on_cpu(SMALL | {"seq_offsets": torch.tensor(offsets), "window_size": 2}), tensors
    )
    assert (o.shape, block_indices.shape) == ((0, 4, 12), (4, 0, 3))
    assert [x.shape for x in gradients] == [x.shape for x in tensors.values()]


@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
@pytest.mark.parametrize("name", ["window", "packed-each-head"])
def test_chunks_do_not_matter(name, chunk, monkeypatch):
    tensors, options = case(name)
    expected = differentiate(on_cpu(options), tensors)
    monkeypatch.setattr(cpu_tiles, "CHUNK", chunk)
    actual = differentiate(on_cpu(options), tensors)
    assert torch.equal(actual[1], expected[1])
    assert_close(actual, expected)


def test_repeatable():
    tensors, options = case("window")
    first, second = (differentiate(on_cpu(options), tensors) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strides_do_not_matter():
    tensors, options = case("window")
    expected = differentiate(on_cpu(options), tensors)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    actual = differentiate(on_cpu(options), strided)
    assert torch.equal(actual[1], expected[1])
    assert_close(actual, expected, tolerance=1e-6)


def test_equal_scores_go_to_the_lower_index():
    tensors = inputs() | {"k": torch.zeros(2, 77, 4, 16)}
    chosen = on_cpu(SMALL)(**tensors)[1]
    assert chosen[0, 0, -1].tolist() == [0, 1, 9]
    assert torch.equal(chosen, reference.block_sparse_attn(**tensors, **SMALL)[1])


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_another_sequence_never_reaches_a_result(packed):
    """Not even where it is NaN, forward and backward."""
    clean = inputs(tokens=20)
    broken = {name: torch.stack([x[0], torch.full_like(x[1], torch.nan)]) for name, x in clean.items()}
    options, mine = SMALL | {"window_size": 9}, 0
    if packed:
        clean, broken = ({name: x.flatten(0, 1) for name, x in tensors.items()} for tensors in (clean, broken))
        options, mine = options | {"seq_offsets": torch.tensor([0, 20, 40])}, slice(0, 20)
    (o, _, *gradients), (broken_o, _, *broken_gradients) = (
        differentiate(on_cpu(options), tensors) for tensors in (clean, broken)
    )
    for actual, expected in zip([broken_o, *broken_gradients], [o, *gradients], strict=True):
        assert torch.equal(actual[mine], expected[mine])


def test_nan_reaches_only_what_sees_it():
    """One value is NaN: rows before it keep every bit; later ones see it in its own block, or in that block's mean."""
    tensors, options = case("own-block")
    o = on_cpu(options)(**tensors)[0]
    tensors["v"][:, 37] = torch.nan
    broken = on_cpu(options)(**tensors)[0]
    assert torch.equal(broken[:, :37], o[:, :37])
    assert broken[:, 37:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    """Everything accumulates in fp32, so what is left is the rounding of inputs' and outputs' own dtype, gates in fp32
    beside it.
    """
    tensors = inputs(dtype=dtype)
    options = SMALL | {"window_size": 9}
    actual = differentiate(on_cpu(options), tensors)
    wide = {name: x.double() for name, x in tensors.items()}
    truth = differentiate(lambda **x: reference.block_sparse_attn(**x, **options, block_indices=actual[1]), wide)
    assert [x.dtype for x in actual] == [dtype, torch.int32] + [dtype] * 4 + [torch.float32] * 3
    # Layer norm magnifies: a branch's output is kept in its own dtype for the backward.
    assert_close(actual, truth, tolerance=8 * torch.finfo(dtype).eps)


def test_u_in_fp32_beside_16_bits():
    tensors = inputs(dtype=torch.bfloat16)
    expected = differentiate(on_cpu(SMALL), tensors)
    actual = differentiate(on_cpu(SMALL), tensors | {"u": tensors["u"].float()})
    assert [x.dtype for x in actual[:6]] == [torch.bfloat16, torch.int32, *[torch.bfloat16] * 3, torch.float32]
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[5].bfloat16(), expected[5])


def test_a_window_of_0_leaves_its_gate_out():
    tensors = inputs() | {"g_swa": torch.full((2, 77, 4), torch.nan)}
    o, _, *gradients = differentiate(on_cpu(SMALL), tensors)
    assert torch.equal(o, on_cpu(SMALL)(**tensors | {"g_swa": None})[0])
    assert not gradients[-1].any()
    assert len(gradients) == 4 + len(GATES)
