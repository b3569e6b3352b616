"""The language model example: a few steps of both models, and decoding from the caches."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
FILE = Path(__file__).parent.parent.parent / "examples" / "train_language_model.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_language_model", FILE)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules["train_language_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_language_model"]


@pytest.mark.slow
def test_both_models_learn(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "BATCH", 2)
    monkeypatch.setattr(example, "CONTEXT", 96)
    example.main(steps=12, seed=0, device="cpu", plot=tmp_path / "loss.png")
    shown = capsys.readouterr().out
    for name in ("native sparse", "dense"):
        (row,) = [line for line in shown.splitlines() if name in line and "│" in line]
        _, steps, first, held_out, _ = (cell.strip() for cell in row.strip("│").split("│"))
        assert int(steps) == 12
        # An even guess among 70 letters costs ln 70 = 4.25.
        assert 4.0 < float(first) < 4.7
        assert float(held_out) < 3.4
    assert example.PROMPT in shown
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_decoding_gives_the_logits_of_the_whole_text(example):
    torch.manual_seed(0)
    model = example.LanguageModel(70, sparse=True)
    letters = torch.randint(70, (2, 120))
    expected = model(letters).detach()
    caches = model.init_caches(2, 120)
    logits = torch.cat([model.step(part, caches) for part in letters.split([50] + [1] * 70, dim=1)], dim=1)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_models_differ_in_attention_alone(example):
    sparse, dense = (example.LanguageModel(70, sparse) for sparse in (True, False))
    without = [
        {name: x.shape for name, x in model.named_parameters() if ".attention." not in name}
        for model in (sparse, dense)
    ]
    assert without[0] == without[1]
    gates = sum(x.numel() for name, x in sparse.named_parameters() if "to_gates" in name)
    assert sum(x.numel() for x in sparse.parameters()) - sum(x.numel() for x in dense.parameters()) == gates


def test_the_text_is_what_its_page_says():
    data = FILE.parent / "data"
    text = (data / "alice.txt").read_text(encoding="ascii")
    assert text.count("CHAPTER") == 12
    assert text.lstrip().startswith("ALICE'S ADVENTURES IN WONDERLAND")
    assert f"{len(text) // 1000} KB" in (data / "README.md").read_text()
