"""The recommender example: its users, a short run of both models, and what they are compared with."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
pytest.importorskip("typer", reason="typer is not installed")
FILE = Path(__file__).parent.parent.parent / "examples" / "train_recommender.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_recommender", FILE)
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up by name.
    sys.modules["train_recommender"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_recommender"]


@pytest.mark.slow
def test_both_models_learn(example, capsys, monkeypatch):
    # Few items and small batches, so that few users tell.
    monkeypatch.setattr(example, "INTERESTS", 6)
    monkeypatch.setattr(example, "ITEMS_EACH", 10)
    monkeypatch.setattr(example, "ITEMS", 60)
    monkeypatch.setattr(example, "BATCH", 8)
    example.main(users=120, epochs=3, seed=0, device="cpu")
    rows = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[0] for row in cells] == ["0", "1", "2", "3", "seconds"]
    popularity = float(cells[0][3])
    # Ten of sixty items by chance, before training.
    assert 10 / 60 < popularity < 0.6
    for column in (1, 2):
        before, _, _, after = (float(row[column]) for row in cells[:4])
        assert before < 0.35
        assert after > before + 0.1
        assert after > popularity + 0.1


def test_users_follow_their_interests(example):
    histories = example.make_histories(200, seed=1)
    assert histories == example.make_histories(200, seed=1)
    assert histories != example.make_histories(200, seed=2)
    assert {len(history) for history in histories} <= set(range(example.SHORTEST, example.LONGEST + 1))
    assert {item for history in histories for item in history} <= set(range(example.ITEMS))
    shares = []
    for history in histories:
        interests = torch.bincount(torch.tensor(history) // example.ITEMS_EACH, minlength=example.INTERESTS)
        shares.append(interests.topk(3).values.sum().item() / len(history))
    # Three interests, and what is popular besides.
    assert 0.8 < sum(shares) / len(shares) < 0.95


def test_the_held_out_item_is_never_seen(example, monkeypatch):
    """A model that records what it is asked, and a loss that records what it is trained for: the last item is in
    neither.
    """
    histories = [[*range(i, i + 6), 300 + i] for i in range(0, 40, 8)]
    seen = []

    class Model(example.Recommender):
        def forward(self, items, offsets):
            seen.append(items)
            return super().forward(items, offsets)

    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda scores, following: seen.append(following) or scores.sum()
    )
    run = example.Run("dense", Model("dense"))
    with example.Progress(disable=True) as progress:
        example.train(run, histories, 1, 0, torch.device("cpu"), progress)
    assert len(run.hit_rates) == 2
    assert len(seen) == 4
    assert max(int(items.max()) for items in seen) < 300


def test_popularity_is_counted_without_what_is_held_out(example):
    # Items 0 to 9 are taken most often; 20 only last.
    histories = [[*range(10), 0], [*range(10), 20], [*range(10), 20], [*range(10), 20]]
    assert example.popularity_hit_rate(histories) == 0.25


def test_the_models_differ_in_attention_alone(example):
    dense, sparse = (dict(example.Recommender(attention).named_parameters()) for attention in ("dense", "block-sparse"))
    own = ("norm_out", "gate_model")
    without = [
        {name: x.shape for name, x in parameters.items() if not any(word in name for word in own)}
        for parameters in (dense, sparse)
    ]
    assert without[0] == without[1]
