"""Wrong calls of attention over a cache: they raise before anything is written or launched."""

import pytest
import torch
from decode_calls import dense, paged

from tilewise import flash_attention_with_kvcache
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")


def call(**more):
    return dense("cpu", lengths=(20, 3), room=32, new=2) | more


def pages(**more):
    return paged(call(), new=2) | more


def with_page(at, page):
    found = pages()
    found["page_table"][at] = page
    return found


def named_twice():
    found = pages(cache_seqlens=torch.tensor([15, 3]))
    found["page_table"][0, 1] = found["page_table"][0, 0]
    return found


def shared_page():
    found = pages()
    found["page_table"][0, 1] = found["page_table"][1, 0]
    return found


BAD = {
    "no-lengths": (call(cache_seqlens=None), TypeError, "cache_seqlens is a NoneType: expected an int32 or int64"),
    "lengths-dtype": (call(cache_seqlens=torch.ones(2)), TypeError, "cache_seqlens is torch.float32: expected int32"),
    "lengths-shape": (
        call(cache_seqlens=torch.tensor([1])),
        ValueError,
        r"cache_seqlens has shape \[1\]: expected \[B\], of 2 entries",
    ),
    "length-negative": (
        call(cache_seqlens=torch.tensor([-1, 3])),
        ValueError,
        "entry 0 has length -1, and 2 come: expected 0 to 30, for there is room for 32 keys",
    ),
    "cache-full": (call(cache_seqlens=torch.tensor([20, 31])), ValueError, "entry 1 has length 31, and 2 come"),
    "number-too-large": (call(cache_seqlens=31), ValueError, "cache_seqlens is 31 and 2 tokens come: .* room for 32"),
    "number-negative": (call(cache_seqlens=-1), ValueError, "cache_seqlens is -1: expected a whole number of at least"),
    "more-than-room": (
        call(k=torch.zeros(2, 33, 2, 16), v=torch.zeros(2, 33, 2, 24)),
        ValueError,
        "^33 tokens come: the cache has room for 32",
    ),
    "k-alone": (call(v=None), ValueError, "k is given without v: give both to append, or neither"),
    "v-alone": (call(k=None), ValueError, "v is given without k"),
    "new-shape": (
        call(v=torch.zeros(2, 3, 2, 24)),
        ValueError,
        r"v has shape \[2, 3, 2, 24\]: expected \[2, 2, 2, 24\], the new tokens",
    ),
    "new-dtype": (call(k=torch.zeros(2, 2, 2, 16).half()), TypeError, "k is torch.float16 and q is torch.float32"),
    "cache-dtype": (
        call(k_cache=torch.zeros(2, 32, 2, 16).half(), v_cache=torch.zeros(2, 32, 2, 24).half()),
        TypeError,
        "k_cache is torch.float16 and q is torch.float32",
    ),
    "cache-heads": (call(k_cache=torch.zeros(2, 32, 3, 16)), ValueError, "v_cache and k_cache must agree"),
    "head-ratio": (
        call(k_cache=torch.zeros(2, 32, 3, 16), v_cache=torch.zeros(2, 32, 3, 24)),
        ValueError,
        "k_cache has 3 heads and q has 4: q's heads must be a multiple",
    ),
    "cache-batch": (
        call(k_cache=torch.zeros(3, 32, 2, 16), v_cache=torch.zeros(3, 32, 2, 24)),
        ValueError,
        "k_cache has batch 3 and q has batch 2",
    ),
    "cache-expanded": (
        call(k_cache=torch.zeros(1, 32, 2, 16).expand(2, 32, 2, 16)),
        ValueError,
        r"k_cache is expanded, with strides \[0, 32, 16, 1\]: .*; give k_cache.contiguous",
    ),
    "heads-expanded": (call(v_cache=torch.zeros(2, 32, 1, 24).expand(2, 32, 2, 24)), ValueError, "v_cache is expanded"),
    "cache-device": (call(v_cache=torch.zeros(2, 32, 2, 24, device="meta")), ValueError, "v_cache is on meta and"),
    "lengths-device": (
        call(cache_seqlens=torch.zeros(2, dtype=torch.int64, device="meta")),
        ValueError,
        "cache_seqlens is on meta and q is on cpu: move it there",
    ),
    "page-size": (
        pages(k_cache=torch.zeros(4, 24, 2, 16), v_cache=torch.zeros(4, 24, 2, 24)),
        ValueError,
        "k_cache has pages of 24 rows: expected a multiple of 16",
    ),
    "table-shape": (
        pages(page_table=torch.zeros(3, 2, dtype=torch.int32)),
        ValueError,
        r"page_table has shape \[3, 2\]: expected \[B, P\], of 2 entries",
    ),
    "page-too-large": (with_page((0, 1), 99), ValueError, r"page_table holds 99 at \[0, 1\], which entry 0 uses: .* 0"),
    "page-negative": (with_page((1, 0), -1), ValueError, r"page_table holds -1 at \[1, 0\], which entry 1 uses"),
    "page-shared": (shared_page(), ValueError, "names it 2 times: a page that is written belongs to one place of one"),
    "page-twice": (named_twice(), ValueError, "is written for entry 0, and page_table names it 2 times"),
    "pool-without-table": (pages(page_table=None), ValueError, "k_cache has batch 6 and q has batch 2"),
    "padding-in-pages": (
        pages(leftpad_k=torch.tensor([1, 0])),
        ValueError,
        "leftpad_k and page_table are both given: pages hold no padding",
    ),
    "padding-range": (call(leftpad_k=torch.tensor([33, 0])), ValueError, "leftpad_k is 33 for entry 0: expected 0 to"),
    "sinks-shape": (call(sinks=torch.zeros(2)), ValueError, r"sinks has shape \[2\]: expected \[Hq\], .* here \[4\]"),
    "sinks-dtype": (call(sinks=torch.zeros(4).int()), TypeError, "sinks is torch.int32: expected float16"),
    "sinks-infinite": (
        call(sinks=torch.full((4,), torch.inf)),
        ValueError,
        "sinks holds inf for head 0: expected",
    ),
    "splits": (call(num_splits=-1), ValueError, "num_splits is -1: expected a whole number of at least 0"),
    "window": (call(window_size=(-2, 0)), ValueError, r"window_size is \(-2, 0\)"),
    "window-bools": (call(window_size=(True, False)), TypeError, r"window_size is \(True, False\): expected two whole"),
    "scale": (call(scale=float("nan")), ValueError, "scale is nan: expected a finite number"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BAD)
def test_it_is_refused(name, backend):
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    arguments, error, message = BAD[name]
    before = arguments["k_cache"].clone()
    with pytest.raises(error, match=message):
        flash_attention_with_kvcache(**arguments, backend=backend)
    assert torch.equal(arguments["k_cache"].nan_to_num(9.0), before.nan_to_num(9.0))


def test_fp64_is_for_the_reference():
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in call().items()}
    with pytest.raises(TypeError, match="q is torch.float64: backend 'cpu' takes"):
        flash_attention_with_kvcache(**doubled, backend="cpu")
    assert flash_attention_with_kvcache(**doubled, backend="reference").dtype == torch.float64


def test_pages_may_be_shared_where_nothing_is_written():
    found = shared_page()
    flash_attention_with_kvcache(**found | {"k": None, "v": None, "cache_seqlens": torch.tensor([17, 3])})


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_what_is_only_read_may_be_expanded(backend):
    """Entries or heads that share keys."""
    whole = call(k=None, v=None)
    for name in ("k_cache", "v_cache"):
        whole[name] = whole[name][:1, :, :1].nan_to_num().expand(2, -1, 2, -1)
    copied = {name: x.contiguous() if isinstance(x, torch.Tensor) else x for name, x in whole.items()}
    expected = flash_attention_with_kvcache(**copied, backend=backend)
    assert torch.equal(flash_attention_with_kvcache(**whole, backend=backend), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [2**31, 2**62])
def test_more_splits_than_keys_are_one_a_tile(device, splits):
    arguments = {name: x.to(device) for name, x in call(k=None, v=None).items() if x is not None}
    expected = flash_attention_with_kvcache(**arguments, num_splits=1000, backend="triton")
    assert torch.equal(flash_attention_with_kvcache(**arguments, num_splits=splits, backend="triton"), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="values of CUDA tensors are checked on request alone")
def test_values_on_a_gpu_are_checked_on_request(device, monkeypatch):
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    arguments = {name: x.to(device) for name, x in BAD["page-too-large"][0].items()}
    with pytest.raises(ValueError, match="page_table holds 99"):
        flash_attention_with_kvcache(**arguments)
