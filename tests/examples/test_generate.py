"""The generate loop: with a cache, dense or in pages, the tokens of a model without one."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parent.parent.parent / "examples" / "generate.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate", FILE)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["generate"]


@pytest.mark.parametrize("words", [["--count", "20"], ["--count", "20", "--paged"]], ids=["dense", "paged"])
def test_the_tokens_are_those_without_a_cache(example, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", *words])
    example.main()
    assert capsys.readouterr().out.splitlines()[-1] == "the same tokens as without a cache"


@pytest.mark.gpu
def test_by_the_kernels_too(example, device, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "triton")
    monkeypatch.setattr(example, "LAYERS", 2)
    torch.manual_seed(0)
    model = example.Transformer().to(device)
    prompts = [torch.randint(example.LETTERS, (length,), device=device) for length in (3, 33)]
    tokens = example.generate(model, prompts, 3, *example.make_cache([6, 36], True, device))
    for prompt, found in zip(prompts, tokens, strict=True):
        assert found.tolist() == example.recompute(model, prompt, 3).tolist()


@torch.no_grad()
def test_the_tokens_depend_on_what_is_in_the_cache(example):
    torch.manual_seed(0)
    model, prompt = example.Transformer(), torch.arange(30)
    right = example.generate(model, [prompt], 10, *example.make_cache([40], False, "cpu"))[0]
    cache, _ = example.make_cache([40], False, "cpu")
    tokens = example.generate(model, [prompt], 1, cache, None)[0]
    for x in (x for layer in cache.layers for x in layer):
        x[:, :5] = 0
    for _ in range(9):
        tokens = torch.cat([tokens, model(tokens[None, -1:], cache)[0, -1:].argmax(-1)])
    assert tokens[0] == right[0]
    assert not torch.equal(tokens, right)
