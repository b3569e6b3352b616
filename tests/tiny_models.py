"""Models of transformers with two or three layers and random weights, and how one is judged against eager in fp64."""

import contextlib
import copy
import functools
from unittest import mock

import pytest
import torch
import transformers

from tilewise.verify.compare import ZERO, compare, is_telling, limits_from_eager, rounding_floor

# What the tests are written for; older ones lack some models.
NEWEST = (5, 23)
COMMON = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
DECODER = COMMON | {
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": None,
    "max_position_embeddings": 131072,
}
ENCODER = COMMON | {"num_hidden_layers": 3, "max_position_embeddings": 64}
EXPERTS = {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
# The token in place of which a part of an image goes.
IMAGE = 98
TWO_KINDS = ["sliding_attention", "full_attention"]
EYES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
EYES |= {"num_hidden_layers": 2}
# Those of Qwen: one layer attends within windows, the other to the whole image.
QWEN_EYES = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2, "patch_size": 4}
QWEN_EYES |= {"out_hidden_size": 32}
QWEN = {
    "text_config": DECODER | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
    "image_token_id": IMAGE,
    "video_token_id": 97,
    "vision_start_token_id": 96,
    "vision_end_token_id": 95,
}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
# The class, its configuration's and what that is told.
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        DECODER | {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3},
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | {"sliding_window": 7, "layer_types": TWO_KINDS}),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 7}),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        DECODER | {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {name: value for name, value in DECODER.items() if name != "head_dim"}
        | LATENT
        | EXPERTS
        | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    ),
    # Every second layer attends to two blocks of four tokens.
    "minimax-m3": (
        "MiniMaxM3VLForCausalLM",
        "MiniMaxM3VLTextConfig",
        DECODER
        | {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2}
        | {"index_n_heads": 2, "index_head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        ENCODER | SPECIAL | {"local_attention": 6, "global_attn_every_n_layers": 3},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {"text_config": DECODER | {"model_type": "llama"}, "image_token_index": IMAGE, "vision_feature_layer": -1}
        | {"vision_config": EYES | {"model_type": "clip_vision_model"}},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"text_config": DECODER | {"model_type": "llama"}, "image_token_id": IMAGE, "scale_factor": 1}
        | {"vision_config": EYES},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        QWEN | {"vision_config": QWEN_EYES | {"window_size": 8, "fullatt_block_indexes": [1]}},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        QWEN | {"vision_config": QWEN_EYES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}},
    ),
}
ENCODERS = ("bert", "modernbert")
SPARSE = "minimax-m3"
VISION = ("llava", "smolvlm", "qwen2.5-vl", "qwen3-vl")
DECODERS = [name for name in MODELS if name not in (*ENCODERS, *VISION, SPARSE)]
LENGTH = 23
IDS = torch.randint(1, 90, (2, LENGTH), generator=torch.Generator().manual_seed(1))
# An image in each row, of four tokens.
SEEING = {"input_ids": IDS.index_fill(1, torch.arange(7, 11), IMAGE)}
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))
PATCHES = {"pixel_values": torch.randn(32, 96, generator=torch.Generator().manual_seed(4))}
PATCHES |= {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": (SEEING["input_ids"] == IMAGE).int()}
IMAGES = {
    "llava": SEEING | {"pixel_values": PIXELS},
    "smolvlm": SEEING | {"pixel_values": PIXELS[:, None]},
    "qwen2.5-vl": SEEING | PATCHES,
    "qwen3-vl": SEEING | PATCHES,
}
LEFT = torch.ones_like(IDS)
LEFT[0, :6] = 0
PADDING = {"dense": None, "left": LEFT, "right": LEFT.flip(1)}
# Sequences of 5, 1 and 17 tokens in one row.
STARTS = torch.tensor([0, 5, 6, LENGTH], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(5), torch.arange(1), torch.arange(17)])[None]
PACKED = {"input_ids": IDS[:1], "position_ids": POSITIONS, "use_cache": False}
BY_OFFSETS = {"cu_seq_lens_q": STARTS, "cu_seq_lens_k": STARTS, "max_length_q": 17, "max_length_k": 17}


def lacks(what):
    """Skip where this release of transformers is an older one, which cannot have it."""
    if tuple(map(int, transformers.__version__.split(".")[:2])) < NEWEST:
        pytest.skip(f"transformers {transformers.__version__} has no {what}")
    pytest.fail(f"transformers {transformers.__version__} has no {what} any more")


def choose(model, implementation):
    """Of classes that do not let it be chosen transformers only says so."""
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation:
        lacks(f"choice of attention in {type(model).__name__}")


def build(model, config, options):
    """In evaluation, with weights that make rows of attention differ."""
    if not hasattr(transformers, model):
        lacks(model)
    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    if "num_experts_per_tok" in options:
        # torch has no grouped product in fp64.
        made.set_experts_implementation("eager")
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            around = float("norm" in name.lower() and name.endswith("weight"))
            weight.copy_(torch.randn(weight.shape, generator=random) * 0.18 + around)
    return made.eval()


@functools.cache
def tiny(name):
    return build(*MODELS[name])


@contextlib.contextmanager
def everything_in_fp64():
    """Models take their norms and softmax to fp32 by name: a truth needs them in fp64 too."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield


def run(model, implementation, inputs):
    """The logits of tokens that are no padding, then every gradient, by name."""
    choose(model, implementation)
    model.zero_grad()
    logits = model(**inputs).logits
    if inputs.get("attention_mask") is not None:
        logits = logits[inputs["attention_mask"].bool()]
    random = torch.Generator().manual_seed(2)
    (logits * torch.randn(logits.shape, generator=random).to(logits.dtype)).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"logits": logits.detach(), **gradients}


def inputs_of(name, kind):
    if kind == "packed":
        return PACKED
    inputs = {"input_ids": IDS, "attention_mask": PADDING[kind]} | IMAGES.get(name, {})
    return inputs | ({} if name in ENCODERS else {"use_cache": False})


@functools.cache
def judges(name, kind, dtype):
    """The truth in fp64, and the limits that eager's error in `dtype` gives."""
    inputs, model = inputs_of(name, kind), tiny(name)
    with everything_in_fp64():
        truth = run(copy.deepcopy(model).double(), "eager", inputs)
    eager = run(copy.deepcopy(model).to(dtype), "eager", inputs)
    # The criterion's floor is of one operator: each layer may cost it.
    layers = model.config.get_text_config().num_hidden_layers + (QWEN_EYES["depth"] if name in VISION else 0)
    floor = layers * rounding_floor(dtype, IDS.device)
    limits = {key: limits_from_eager(x, eager[key], gradient=key != "logits", floor=floor) for key, x in truth.items()}
    for key, x in truth.items():
        if x.abs().max() < ZERO:
            # A bias of all keys alike changes nothing: its gradient is rounding, of the size of the weight's.
            limits[key] = limits[key.replace(".bias", ".weight")]
    assert is_telling(truth["logits"], limits["logits"])
    return truth, limits


def failures(name, kind, dtype=torch.float32, implementation="tilewise"):
    """What of the model's logits and gradients fails verify's criterion with that attn_implementation."""
    truth, limits = judges(name, kind, dtype)
    got = run(copy.deepcopy(tiny(name)).to(dtype), implementation, inputs_of(name, kind))
    lost = [f"no gradient reaches {key}" for key in truth if key not in got]
    found = [compare(key, x, truth[key], dtype, limits[key], "xy"[: x.dim()]) for key, x in got.items()]
    return lost + [line for one in found if not one.passed for line in one.lines()]


def generated(name, implementation, rows=slice(None), prompt=LENGTH, padding=LEFT, **options):
    """Twelve more tokens of the batch that is padded on the left, of some of its rows or the end of its prompts."""
    model = tiny(name)
    choose(model, implementation)
    torch.manual_seed(3)
    options = {"do_sample": False, "max_new_tokens": 12} | options
    inputs = {"input_ids": IDS[rows, -prompt:], "attention_mask": padding[rows, -prompt:]} | IMAGES.get(name, {})
    return model.generate(**inputs, **options)[:, prompt:]


def over_a_cache(name, implementation, static):
    """The logits of both rows' tokens where they come in several pieces."""
    model = tiny(name)
    choose(model, implementation)
    options = {"max_cache_len": 40} if static else {}
    cache = getattr(transformers, "StaticCache" if static else "DynamicCache")(config=model.config, **options)
    with torch.no_grad():
        pieces = IDS.split([15, 3, *[1] * (LENGTH - 18)], dim=1)
        return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


def compiled(name, implementation, **options):
    """Tokens of a static cache by one graph, and how many of it there were."""
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    graphs.clear()
    how = transformers.CompileConfig(backend="eager", fullgraph=True)
    how._compile_all_devices = True
    tokens = generated(name, implementation, cache_implementation="static", compile_config=how, **options)
    return tokens.tolist(), graphs["unique_graphs"]
