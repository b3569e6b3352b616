"""What is kept: the least recently used entry goes first, one at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tilewise.ops._host.kept import Kept


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
