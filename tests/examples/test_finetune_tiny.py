"""The tiny model learns the same with tilewise and with sdpa, and writes what it learned."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")
FILE = Path(__file__).parent.parent.parent / "examples" / "finetune_tiny.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_tiny", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_is_of_the_answer_alone(example):
    given = example.lesson(["abc", "defghi"])
    shown = [bytes(row[row >= 0].tolist()).decode() for row in given["labels"]]
    assert shown == ["cba\n", "ihgfed\n"]
    assert given["attention_mask"].sum(1).tolist() == [8, 14]


def test_both_learn_the_same(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["finetune_tiny.py", "--steps", "61"])
    monkeypatch.setattr(example, "SHOWN", 20)
    example.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["loss", "at", "step", "tilewise", "sdpa"]
    steps, *curves = zip(*(map(float, row.split()) for row in rows[:4]), strict=True)
    assert steps == (0, 20, 40, 60)
    assert curves[0][:2] == pytest.approx(curves[1][:2], abs=2e-4)
    for losses in curves:
        assert losses[-1] < losses[0] / 3
    assert [row.split()[0] for row in rows[-2:]] == ["tilewise", "sdpa"]
