"""Sparse models of transformers with attn_implementation="tilewise": blocks that are chosen, and what must raise."""

import pytest
import torch

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")

from tiny_models import (  # noqa: E402
    BY_OFFSETS,
    IDS,
    LEFT,
    MODELS,
    PACKED,
    PADDING,
    SPARSE,
    build,
    compiled,
    failures,
    generated,
    over_a_cache,
    run,
    tiny,
)

from tilewise.integrations.transformers import register  # noqa: E402

CACHES = [{}, {"cache_implementation": "static"}]
WHOLE = torch.ones_like(LEFT)


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.mark.parametrize("kind", ["dense", "right"])
def test_logits_and_gradients(kind):
    assert failures(SPARSE, kind) == []


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_logits_over_a_cache(static):
    ours, eager = (over_a_cache(SPARSE, name, static) for name in ("tilewise", "eager"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES, ids=["dynamic", "static"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt": 1}, {"prefill_chunk_size": 5}],
    ids=["greedy", "beams", "one token", "chunks"],
)
def test_generates_what_eager_does(options, cache):
    options = options | cache | {"padding": WHOLE}
    assert generated(SPARSE, "tilewise", **options).tolist() == generated(SPARSE, "eager", **options).tolist()


def test_several_tokens_at_a_time_over_a_cache():
    options = {"rows": slice(1, 2), "prompt_lookup_num_tokens": 3, "eos_token_id": 98}
    assert generated(SPARSE, "tilewise", **options).tolist() == generated(SPARSE, "eager", **options).tolist()


def test_a_compiled_decode_has_no_graph_breaks_and_compiles_no_more_than_eager(request):
    # Eager experts loop over those that are hit.
    tiny(SPARSE).set_experts_implementation("batched_mm")
    request.addfinalizer(lambda: tiny(SPARSE).set_experts_implementation("eager"))
    tokens, graphs = compiled(SPARSE, "tilewise", padding=WHOLE)
    expected, allowed = compiled(SPARSE, "eager", padding=WHOLE)
    assert tokens == expected
    assert 0 < graphs <= allowed


def test_tokens_after_a_prompt_that_is_padded_on_the_right():
    """The cache of a prefill with padding, then tokens of the longer row alone."""
    model = tiny(SPARSE)
    found = []
    for implementation in ("eager", "tilewise"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(IDS, attention_mask=PADDING["right"], use_cache=True)
            out.past_key_values.batch_select_indices(torch.tensor([1]))
            more = model(IDS[1:, :3], past_key_values=out.past_key_values).logits
        found.append(torch.cat([out.logits[PADDING["right"].bool()], more[0]]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def left(implementation):
    return run(tiny(SPARSE), implementation, {"input_ids": IDS, "attention_mask": LEFT, "use_cache": False})["logits"]


def left_over_a_cache(implementation):
    return generated(SPARSE, implementation)


def packed(implementation):
    return run(tiny(SPARSE), implementation, PACKED)["logits"]


@pytest.mark.parametrize("sparse", [left, left_over_a_cache, packed])
def test_blocks_that_are_not_counted_from_a_sequences_first_token(sparse):
    """By default they raise; by sdpa the choice is part of the mask."""
    with pytest.raises(NotImplementedError, match=r"a choice of blocks \(block_indices\) with padding on the left"):
        sparse("tilewise")
    register(unsupported="sdpa")
    with pytest.warns(UserWarning, match=r"a choice of blocks \(block_indices\) with padding on the left"):
        found = sparse("tilewise")
    torch.testing.assert_close(found, sparse("sdpa"), rtol=1e-4, atol=1e-4)


def packed_by_offsets():
    tiny(SPARSE).set_attn_implementation("tilewise")
    tiny(SPARSE)(input_ids=IDS[:1], use_cache=False, **BY_OFFSETS)


def sparse_by_tokens():
    options = MODELS["deepseek-v3"][2] | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    run(build("DeepseekV32ForCausalLM", "DeepseekV32Config", options), "tilewise", {"input_ids": IDS})


@pytest.mark.parametrize(
    ("sparse", "said"),
    [
        (packed_by_offsets, r"a choice of blocks \(block_indices\) with padding on the left or between tokens"),
        (sparse_by_tokens, r"a choice of keys \(indices"),
    ],
)
@pytest.mark.parametrize("unsupported", ["raise", "sdpa"])
def test_what_sdpa_would_drop_raises(sparse, said, unsupported):
    register(unsupported=unsupported)
    with pytest.raises(NotImplementedError, match=said):
        sparse()


def test_the_reference_takes_whole_sequences_alone(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    assert failures(SPARSE, "dense") == []
    with pytest.raises(NotImplementedError, match="TILEWISE_BACKEND is 'reference'"):
        generated(SPARSE, "tilewise", padding=WHOLE)
