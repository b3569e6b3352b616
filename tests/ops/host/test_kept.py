"""What is remembered: the least recently used entry goes first, one at a time, and keys tell types apart."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._host import template
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.template import Operation
from tilewise.ops.flash import api


def test_the_least_recently_used_goes_first_and_alone():
    kept = Kept(3)
    for i in range(3):
        kept.add((i,), f"value {i}")
    assert kept.get((0,)) == "value 0"
    kept.add((3,), "value 3")
    assert [kept.get((i,)) for i in range(4)] == ["value 0", None, "value 2", "value 3"]
    kept.add((2,), "again")
    assert len(kept) == 3
    kept.add((4,), "value 4")
    assert [kept.get((i,)) for i in range(5)] == [None, None, "again", "value 3", "value 4"]
    kept.clear()
    assert len(kept) == 0
    assert kept.get((4,)) is None


def test_threads_share_it():
    kept = Kept(8)
    meet = threading.Barrier(8)

    def work(seed):
        meet.wait()
        for i in range(3000):
            key = ((i * (seed + 1)) % 13,)
            found = kept.get(key)
            assert found is None or found == key
            if found is None:
                kept.add(key, key)
            assert len(kept) <= 8 + 8, "each thread adds before it makes room"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(kept) == 8


@pytest.fixture
def qkv():
    api.flash_forward.forget()
    return [torch.randn(1, 6, 2, 16) for _ in range(3)]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"scale": 1}, {"scale": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"max_seqlen_q": 1}, {"max_seqlen_q": True}),
    ],
    ids=str,
)
def test_an_option_is_checked_though_an_equal_one_was_remembered(qkv, good, bad):
    for _ in range(2):
        flash_attention(*qkv, **good)
    with pytest.raises(TypeError):
        flash_attention(*qkv, **bad)


def test_equal_options_of_other_types_are_problems_of_their_own(qkv):
    problems = api.flash_forward._problems
    results = [flash_attention(*qkv, causal=causal, scale=scale) for causal in (True, 1) for scale in (1, 1.0)]
    assert len(problems) == 4
    assert all(torch.equal(results[0], x) for x in results)


def test_an_operation_tells_numbers_and_tuples_apart(monkeypatch):
    class Recorded:
        """In place of a GPU's tensor."""

        device = torch.device("cuda", 0)

    keys = []
    operation = Operation(lambda *arguments: None)
    monkeypatch.setattr(operation._templates, "add", lambda key, value: keys.append(key))

    def read(arguments, key, tensors):
        original(arguments, key, [])
        tensors.append(Recorded())

    original = template._read
    monkeypatch.setattr(template, "_read", read)
    calls = [(1,), (True,), (1.0,), (None,), ((1, 2),), ((1,), 2), ((True, 2),), (("a",),), ("a",)]
    for arguments in calls:
        operation(*arguments)
    assert len(set(keys)) == len(calls)
