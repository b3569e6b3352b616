"""Models of transformers with attn_implementation="tilewise": against eager, and where they must raise."""

import sys
from itertools import pairwise

import pytest
import torch

pytestmark = pytest.mark.transformers
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")

from tiny_models import (  # noqa: E402
    BY_OFFSETS,
    DECODER,
    DECODERS,
    ENCODERS,
    EYES,
    IDS,
    IMAGE,
    LEFT,
    LENGTH,
    MODELS,
    PACKED,
    PIXELS,
    SEEING,
    STARTS,
    VISION,
    build,
    choose,
    compiled,
    failures,
    generated,
    run,
    tiny,
)

from tilewise.integrations.transformers import register  # noqa: E402

CACHES = [{}, {"cache_implementation": "static"}]


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.mark.parametrize("kind", ["dense", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS, *VISION])
def test_logits_and_gradients(name, kind):
    assert failures(name, kind) == []


# The mask of gpt-oss takes no position_ids.
@pytest.mark.parametrize("name", [name for name in DECODERS if name != "gpt-oss"])
def test_sequences_packed_by_position_ids(name):
    assert failures(name, "packed") == []


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_16_bits(name):
    assert failures(name, "left", torch.bfloat16) == []


@pytest.mark.parametrize("name", DECODERS)
def test_sequences_packed_by_offsets_are_each_alone(name):
    model = tiny(name)
    choose(model, "tilewise")
    with torch.no_grad():
        packed = model(**PACKED, **BY_OFFSETS).logits[0]
        alone = [model(IDS[:1, a:b], use_cache=False).logits[0] for a, b in pairwise(STARTS)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", CACHES, ids=["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generates_what_eager_does_and_each_row_alone(name, cache):
    tokens = generated(name, "tilewise", **cache)
    assert tokens.tolist() == generated(name, "eager", **cache).tolist()
    model = tiny(name)
    alone = [
        model.generate(ids[keep][None], max_new_tokens=12, do_sample=False, **cache)[:, -12:]
        for ids, keep in zip(IDS, LEFT.bool(), strict=True)
    ]
    assert tokens.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("cache", CACHES, ids=["dynamic", "static"])
@pytest.mark.parametrize("name", VISION)
def test_generates_what_eager_does_from_an_image(name, cache):
    assert generated(name, "tilewise", **cache).tolist() == generated(name, "eager", **cache).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.7},
        {"rows": slice(1), "prompt_lookup_num_tokens": 3, "eos_token_id": 98},
    ],
    ids=["beams", "sampled", "lookup"],
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_ways_to_generate(name, options):
    assert generated(name, "tilewise", **options).tolist() == generated(name, "eager", **options).tolist()


def test_generates_with_an_assistant():
    options = {"rows": slice(1, 2), "assistant_model": tiny("llama")}
    assert generated("gemma2", "tilewise", **options).tolist() == generated("gemma2", "eager", **options).tolist()


# A prompt that fills the window of gemma2, and one that does not.
@pytest.mark.parametrize("prompt", [LENGTH, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_decode_has_no_graph_breaks_and_compiles_no_more_than_eager(name, prompt):
    tokens, graphs = compiled(name, "tilewise", prompt=prompt)
    expected, allowed = compiled(name, "eager", prompt=prompt)
    assert tokens == expected
    assert 0 < graphs <= allowed


def test_a_compiled_model():
    model = tiny("gemma2")
    choose(model, "tilewise")
    torch._dynamo.reset()
    inputs = {"input_ids": IDS, "attention_mask": LEFT, "use_cache": False}
    expected = run(model, "tilewise", inputs)
    got = torch.compile(model, backend="eager")(**inputs).logits[LEFT.bool()]
    torch.testing.assert_close(got, expected["logits"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_checkpointed_gradients_are_the_same(name, reentrant):
    inputs = {"input_ids": IDS, "attention_mask": LEFT, "use_cache": False}
    model = build(*MODELS[name]).train()
    whole = {key: x.clone() for key, x in run(model, "tilewise", inputs).items()}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    again = run(model, "tilewise", inputs)
    assert all(torch.equal(whole[key], x) for key, x in again.items())


def test_padding_between_tokens():
    """As right-padded prompts have it when they go on."""
    mask = LEFT.clone()
    mask[1, 4:6] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask, "use_cache": False}
    eager, ours = (run(tiny("llama"), name, inputs)["logits"] for name in ("eager", "tilewise"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    with pytest.raises(NotImplementedError, match="a window over keys with padding between them"):
        run(tiny("mistral"), "tilewise", inputs)


# Tokens of an image that see each other.
def gemma3():
    text = DECODER | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    tokens = {"image_token_index": IMAGE, "boi_token_index": 97, "eoi_token_index": 96, "mm_tokens_per_image": 4}
    options = {"text_config": text, "vision_config": EYES} | tokens
    kinds = (SEEING["input_ids"] == IMAGE).int()
    model = build("Gemma3ForConditionalGeneration", "Gemma3Config", options)
    return model, SEEING | {"token_type_ids": kinds, "pixel_values": PIXELS}


# So do those of a prompt, before a suffix that is learnt.
def paligemma():
    text, eyes = DECODER | {"model_type": "gemma"}, EYES | {"model_type": "siglip_vision_model"}
    options = {"text_config": text, "vision_config": eyes, "image_token_index": IMAGE, "projection_dim": 32}
    kinds = (torch.arange(LENGTH) > 14).int().expand(2, -1)
    model = build("PaliGemmaForConditionalGeneration", "PaliGemmaConfig", options)
    return model, SEEING | {"token_type_ids": kinds, "pixel_values": PIXELS}


def chunked():
    options = {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "moe_layers": []}
    return build("Llama4ForCausalLM", "Llama4TextConfig", DECODER | options), {"input_ids": IDS}


def t5():
    options = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = build("T5ForConditionalGeneration", "T5Config", options | {"dropout_rate": 0.0})
    return model, {"input_ids": IDS, "decoder_input_ids": IDS[:, :9]}


def switch(model, implementation):
    """Each of its models by itself: older versions of transformers leave T5's stacks out."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            choose(part, implementation)


def own_mask():
    mask = torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -1e30)
    return tiny("llama"), {"input_ids": IDS, "attention_mask": mask}


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (gemma3, "a union of masks ("),
        (paligemma, "a union of masks ("),
        (chunked, "a mask of chunked attention"),
        (t5, "a bias added to scores (position_bias"),
        (own_mask, "a mask of the caller's own"),
    ],
)
def test_what_is_refused_is_named_or_left_to_sdpa(made, named):
    model, inputs = made()
    switch(model, "eager")
    with torch.no_grad():
        expected = model(**inputs).logits
        switch(model, "tilewise")
        with pytest.raises(NotImplementedError) as refused:
            model(**inputs)
        assert named in str(refused.value)
        assert 'use attn_implementation="' in str(refused.value)
        register(unsupported="sdpa")
        with pytest.warns(UserWarning, match="layers with it take transformers' sdpa") as said:
            got = [model(**inputs).logits for _ in range(2)]
    assert len({str(one.message) for one in said}) == len(said)
    assert any(named in str(one.message) for one in said)
    for logits in got:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_dropout_in_training():
    model = build("LlamaForCausalLM", "LlamaConfig", DECODER | {"attention_dropout": 0.1})
    choose(model, "tilewise")
    model(IDS)
    with pytest.raises(NotImplementedError, match=r"dropout \(0.1 in training\): set attention_dropout to 0"):
        model.train()(IDS)
    register(unsupported="sdpa")
    with pytest.warns(UserWarning, match="dropout"):
        assert not torch.equal(model(IDS).logits, model(IDS).logits)


def test_weights_to_return():
    choose(tiny("llama"), "tilewise")
    with pytest.raises(NotImplementedError, match="returning the weights"):
        tiny("llama")(IDS, output_attentions=True)


def test_a_wrong_choice_and_an_old_transformers_are_named(monkeypatch):
    with pytest.raises(ValueError, match="unsupported is 'warn': expected 'raise' or 'sdpa'"):
        register(unsupported="warn")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    with pytest.raises(ImportError, match=r"transformers is 5.3.0: expected 5.4 or newer"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'tilewise\\[transformers\\]'"):
        register()
