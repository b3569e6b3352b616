"""What is read off a mask against the whole mask that transformers makes of it."""

import warnings

import pytest
import torch

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")

from transformers import masking_utils as made  # noqa: E402

from tilewise.integrations.transformers.attend import attention  # noqa: E402
from tilewise.integrations.transformers.masks import mask  # noqa: E402
from tilewise.integrations.transformers.refuse import Refuse  # noqa: E402

REFUSE = Refuse(fall_back=False)
CAUSAL, WINDOW = made.causal_mask_function, made.sliding_window_causal_mask_function(5)
BOTH, NEAR = made.bidirectional_mask_function, made.sliding_window_bidirectional_mask_function(3)
SEQUENCES = torch.tensor([[0] * 4 + [1] * 7, [0] + [1] * 8 + [2] * 2])
POSITIONS = torch.tensor([[*range(4), *range(7)], [0, *range(8), *range(2)]])
# Of three rows of 19 slots: padding on the left, on the right, and nothing but padding.
KEEP = torch.tensor([[0] * 7 + [1] * 12, [1] * 15 + [0] * 4, [0] * 19]).bool()


# Before transformers 5.23 indices were positions.
REMAPS = hasattr(made, "remap_positions_for_packed_sequence")


def packed(function):
    if REMAPS:
        return made.packed_sequence_compatibility_function(function, POSITIONS, SEQUENCES)
    return made.and_masks(function, made.packed_sequence_mask_function(SEQUENCES))


CASES = {
    "causal": (CAUSAL, 11, 11, 0, 0, None),
    "both sides": (BOTH, 11, 11, 0, 0, None),
    "other keys": (BOTH, 7, 19, 0, 0, KEEP),
    "window": (WINDOW, 11, 11, 0, 0, None),
    "near": (NEAR, 19, 19, 0, 0, KEEP),
    "padded": (CAUSAL, 19, 19, 0, 0, KEEP),
    "padded window": (WINDOW, 19, 19, 0, 0, KEEP),
    "several tokens": (CAUSAL, 4, 19, 15, 0, KEEP),
    "several tokens, window": (WINDOW, 4, 19, 15, 0, KEEP),
    "static": (CAUSAL, 4, 30, 15, 0, KEEP),
    "static, length on the device": (WINDOW, 4, 30, torch.tensor(15), 0, KEEP[:1]),
    "static, first tokens": (CAUSAL, 19, 30, 0, 0, KEEP),
    "cache that slides": (WINDOW, 3, 7, 16, 12, KEEP[:1]),
    "cache that slides, one token": (WINDOW, 1, 5, 18, 14, KEEP[:1]),
    "packed": (packed(CAUSAL), 11, 11, 0, 0, None),
    "packed windows": (packed(WINDOW), 11, 11, 0, 0, None),
    "packed, both sides": (packed(NEAR), 11, 11, 0, 0, None),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_whole_mask(name, training):
    function, q_length, kv_length, q_offset, kv_offset, keep = CASES[name]
    batch = 2 if keep is None else len(keep)
    where = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    where |= {"batch_size": batch, "mask_function": function, "attention_mask": keep}
    random = torch.Generator().manual_seed(5)
    # Views of [B, T, H, D], as models pass them.
    q, k, v = (
        torch.randn(batch, length, heads, 8, generator=random).transpose(1, 2).requires_grad_(training)
        for length, heads in ((q_length, 4), (kv_length, 2), (kv_length, 2))
    )
    whole = made.sdpa_mask(**where, allow_is_causal_skip=False)
    # Rows that see something, of queries that are no padding.
    real = whole.any(-1)[:, 0]
    if keep is not None and function is not BOTH:
        slots = torch.arange(q_length) + q_offset
        real &= torch.nn.functional.pad(keep, (0, 30))[:, slots]
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*exact_inputs, attn_mask=whole, enable_gqa=True)
    exact = exact.transpose(1, 2)[real]
    with torch.set_grad_enabled(training):
        o, _ = attention(REFUSE)(torch.nn.Module(), q, k, v, mask(REFUSE)(**where, config=None, dtype=q.dtype))
    assert o.is_contiguous()
    torch.testing.assert_close(o[real].double(), exact, rtol=1e-5, atol=1e-5)
    if training:
        do = torch.randn(exact.shape, generator=random)
        gradients = torch.autograd.grad(o[real], (q, k, v), do)
        for got, expected in zip(gradients, torch.autograd.grad(exact, exact_inputs, do.double()), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def attend(length=4, kv_length=4, is_causal=None, mask_of=None, refuse=REFUSE, **given):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (length, kv_length, kv_length))
    if mask_of is not None:
        given["attention_mask"] = mask(refuse)(batch_size=1, **{"mask_function": CAUSAL} | mask_of)
    return attention(refuse)(
        torch.nn.Module(), q, k, v, given.pop("attention_mask", None), is_causal=is_causal, **given
    )


OFFSETS = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mask_of": {"q_length": 4, "kv_length": 5}}, "the mask was made for 4 queries and 5 keys, and layer . has 4"),
        ({"mask_of": {"q_length": 4, "kv_length": 4}, "sliding_window": 3}, r"has sliding_window 3 and a mask with"),
        ({"kv_length": 9, "is_causal": True}, "a causal layer has 4 queries, 9 keys and no mask"),
        ({"cu_seq_lens_q": OFFSETS}, "one of cu_seq_lens_q and cu_seq_lens_k is given: give both, or neither"),
        (
            {
                "mask_of": {"q_length": 4, "kv_length": 4, "attention_mask": torch.tensor([[True, True, True, False]])},
                "cu_seq_lens_q": OFFSETS,
                "cu_seq_lens_k": OFFSETS,
            },
            "cu_seq_lens_q is given with padding or a static cache",
        ),
    ],
)
def test_what_contradicts_itself_raises(given, said):
    with pytest.raises(ValueError, match=said):
        attend(**given)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_layer_without_a_mask(is_causal):
    """As vision towers have them."""
    q, k, v = torch.randn(3, 1, 2, 11, 8)
    ours, _ = attention(REFUSE)(torch.nn.Module(), q, k, v, None, is_causal=is_causal, sliding_window=4)
    distance = torch.arange(11)[:, None] - torch.arange(11)
    seen = (distance < 4) & (distance >= 0 if is_causal else distance > -4)
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen)
    torch.testing.assert_close(ours.double(), exact.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_a_mask_function_of_the_callers_own_is_named():
    def own(batch, head, q, kv):
        return q >= kv

    where = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with pytest.raises(NotImplementedError, match=r"a mask of mask function .*\.own: use attn_implementation"):
        mask(REFUSE)(**where, mask_function=made.and_masks(CAUSAL, own))


@pytest.mark.skipif(not REMAPS, reason="this transformers does not remap positions")
def test_positions_of_the_callers_own_are_named():
    where = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with pytest.raises(NotImplementedError, match="positions of the caller's own"):
        mask(REFUSE)(**where, mask_function=made.remap_positions_for_packed_sequence(CAUSAL, POSITIONS))


@pytest.mark.parametrize("fall_back", [False, True])
@pytest.mark.parametrize("change", [torch.clone, lambda x: x[:, :, -1:]], ids=["copied", "cut"])
def test_a_copied_mask_raises_and_never_goes_to_sdpa(change, fall_back):
    """As between GPUs, or as Gemma 4 cuts it: what it says is not in the tensor, nor whether it is causal."""
    copied = change(mask(REFUSE)(batch_size=1, q_length=4, kv_length=4, mask_function=CAUSAL))
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="a mask that a model or a hook has copied"):
        attention(Refuse(fall_back=fall_back))(torch.nn.Module(), q, k, v, copied)
    # Nor can a model add it to scores of its own.
    with pytest.raises(RuntimeError, match="must match"):
        q @ k.mT + copied


def test_wide_heads_are_named_or_left_to_sdpa():
    q, k, v = torch.randn(3, 1, 2, 4, 264)
    with pytest.raises(NotImplementedError, match="heads of more than 256 channels"):
        attention(REFUSE)(torch.nn.Module(), q, k, v, None)
    made_mask = mask(REFUSE)(batch_size=1, q_length=4, kv_length=4, mask_function=CAUSAL)
    with pytest.warns(UserWarning, match="heads of more than 256 channels"):
        o, _ = attention(Refuse(fall_back=True))(torch.nn.Module(), q, k, v, made_mask)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cache", "sinks", "indices", "output_attentions"])
def test_what_sdpa_would_drop_too_raises(name):
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=rf"\({name}"):
        attention(Refuse(fall_back=True))(torch.nn.Module(), q, k, v, None, **{name: torch.ones(1)})


PADDED = {"q_length": 4, "kv_length": 4, "attention_mask": torch.tensor([[True, True, True, False]])}
UNION = made.or_masks(CAUSAL, BOTH)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dropout": 0.1, "mask_of": PADDED, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS}, "dropout"),
        ({"dropout": 0.1, "cu_seq_lens_k": OFFSETS}, "dropout"),
        ({"attention_mask": torch.ones(1, 4).bool()}, "a mask of the caller's own"),
        (
            {"mask_of": {"q_length": 4, "kv_length": 4, "mask_function": UNION}, "softcap": 2.0},
            r"a mask of a union of masks \(.*\) together with softcap",
        ),
    ],
)
def test_what_goes_to_sdpa_is_whole(given, named):
    """Where sdpa would be told less than the layer was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match=named):
            attend(refuse=Refuse(fall_back=True), **given)
