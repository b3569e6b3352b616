"""Steps of decoding by programs, as on a GPU: they give what plans give, and refuse what the checks refuse."""

import pytest
import torch
from decode_calls import dense
from runtime_problems import ON_GPU

from tilewise import NSACache, flash_attention_with_kvcache, nsa_decode_step
from tilewise.ops.nsa.cached import launch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")]
PLANS = ("write", "store_windows", "attend", "commit")


def by_programs(monkeypatch):
    """The plans' operations run programs, though their tensors are on the CPU."""
    for name in PLANS:
        planned = getattr(launch, name)._planned
        planned.forget()
        monkeypatch.setattr(
            launch, name, lambda *given, one=planned: (one.known(given) or one.make(given)).run(), raising=True
        )


def steps(compress, pages):
    generator = torch.Generator().manual_seed(0)
    paging = {}
    if pages:
        pools = [torch.randn(7, 16, 1, d, generator=generator) for d in (8, 5)]
        table = torch.tensor([[3, 1, 6], [0, 4, 5]])
        paging = {"page_table": table, "k_pages": pools[0], "v_pages": pools[1]}
    sizes = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 3, "window_size": 9}
    cache = NSACache(2, 40, 1, 8, 5, **sizes, **paging, compress=compress)
    found = []
    for n in (13, 1, 1, 2):
        shapes = {"q": (2, 8), "k": (1, 8), "v": (1, 5)} | dict.fromkeys(("g_cmp", "g_slc", "g_swa"), (2,))
        new = {name: torch.randn(2, n, *shape, generator=generator) for name, shape in shapes.items()}
        counts = torch.tensor([n, n - 1])
        found += nsa_decode_step(**new, cache=cache, counts=counts, return_indices=True, backend="triton")
    return [*found, cache.lengths]


@pytest.mark.parametrize("pages", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("compress", [None, lambda k, v: (k.sum(2), v.sum(2))], ids=["means", "learned"])
def test_steps_by_programs(compress, pages, programmed, on_the_cpu, monkeypatch):
    expected = steps(compress, pages)
    with monkeypatch.context() as patch:
        by_programs(patch)
        found = steps(compress, pages)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    # A step of one token is what the step before was.
    assert len(programmed) < 4 * (3 if compress is None else 4)


def test_a_number_without_room_is_refused_by_programs_too(programmed):
    """The host knows it: a program that served a smaller one must not serve it."""
    call = dense("cpu", lengths=(20, 20), room=32, new=2)
    for number in (20, 30):
        flash_attention_with_kvcache(**call | {"cache_seqlens": number}, backend="triton")
    before = call["k_cache"].clone()
    with pytest.raises(ValueError, match="cache_seqlens is 31 and 2 tokens come: the cache has room for 32"):
        flash_attention_with_kvcache(**call | {"cache_seqlens": 31}, backend="triton")
    assert torch.equal(call["k_cache"].nan_to_num(9.0), before.nan_to_num(9.0))
    assert programmed
