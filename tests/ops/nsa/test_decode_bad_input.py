"""Wrong calls of decoding raise before anything is stored, naming the argument, what was expected and what came."""

import pytest
import torch

from tilewise.ops.nsa.decode import NSACache, nsa_decode_step

SMALL = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 8,
    "block_count": 4,
    "window_size": 11,
    "init_blocks": 1,
    "local_blocks": 2,
}
TOKENS = 61


def draw():
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (6, 8), "k": (2, 8), "v": (2, 5), "g_cmp": (6,), "g_slc": (6,), "g_swa": (6,)}
    return {
        name: torch.randn(2, TOKENS, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


def cut(tensors, tokens):
    return {name: x[:, tokens] for name, x in tensors.items()}


def make_cache():
    return NSACache(2, TOKENS, 2, 8, 5, **SMALL, dtype=torch.float64)


def bad(**changes):
    return cut(draw(), slice(0, 3)) | changes


BAD = {
    "no-gates": (bad(g_cmp=None, g_slc=None, g_swa=None), ValueError, "g_cmp, g_slc and g_swa are all None"),
    "no-choice": (bad(g_slc=None, return_indices=True), ValueError, "return_indices is set and g_slc is None"),
    "gate-shape": (
        bad(g_swa=torch.ones(2, 3, 5)),
        ValueError,
        r"g_swa has shape \[2, 3, 5\]: expected \[B, n, Hq\], here \[2, 3, 6\]",
    ),
    "gate-dtype": (bad(g_swa=torch.ones(2, 3, 6).half()), TypeError, "g_swa is torch.float16 and q is torch.float64"),
    "gate-list": (bad(g_cmp=[1.0]), TypeError, "g_cmp is a list"),
    "cache": (bad(cache={}), TypeError, "cache is a dict: expected an NSACache"),
    "q-list": (bad(q=[1.0]), TypeError, "q is a list"),
    "q-batch": (
        bad(q=torch.ones(3, 3, 6, 8).double()),
        ValueError,
        r"q has shape \[3, 3, 6, 8\]: the cache expects \[2, n, Hq, 8\]",
    ),
    "q-channels": (
        bad(q=torch.ones(2, 3, 6, 7).double()),
        ValueError,
        r"q has shape \[2, 3, 6, 7\]: the cache expects \[2, n, Hq, 8\]",
    ),
    "q-heads": (
        bad(q=torch.ones(2, 3, 5, 8).double()),
        ValueError,
        "q has 5 heads and the cache has 2: q's heads must be a multiple",
    ),
    "q-tokens": (bad(q=torch.ones(2, 4, 6, 8).double()), ValueError, "q has 4 new tokens and k has 3"),
    "q-dtype": (
        bad(q=torch.ones(2, 3, 6, 8)),
        TypeError,
        "q is torch.float32 and the cache holds torch.float64: .*dtype=torch.float32",
    ),
    "q-device": (
        bad(q=torch.ones(2, 3, 6, 8, device="meta").double()),
        ValueError,
        "q is on meta and the cache is on cpu",
    ),
    "k-list": (bad(k=[1.0]), TypeError, "k is a list"),
    "k-heads": (
        bad(k=torch.ones(2, 3, 3, 8).double()),
        ValueError,
        r"k has shape \[2, 3, 3, 8\]: the cache expects \[2, n, 2, 8\]",
    ),
    "k-rank": (
        bad(k=torch.ones(3, 2, 8).double()),
        ValueError,
        r"k has shape \[3, 2, 8\]: the cache expects \[2, n, 2, 8\]",
    ),
    "k-dtype": (bad(k=torch.ones(2, 3, 2, 8)), TypeError, "k is torch.float32 and the cache holds torch.float64"),
    "v-channels": (
        bad(v=torch.ones(2, 3, 2, 8).double()),
        ValueError,
        r"v has shape \[2, 3, 2, 8\]: the cache expects \[2, n, 2, 5\]",
    ),
    "v-tokens": (bad(v=torch.ones(2, 2, 2, 5).double()), ValueError, "k has 3 new tokens and v has 2"),
    "v-device": (
        bad(v=torch.ones(2, 3, 2, 5, device="meta").double()),
        ValueError,
        "v is on meta and the cache is on cpu",
    ),
    "scale": (bad(scale=float("nan")), ValueError, "scale is nan: expected a finite number"),
    "backend": (bad(backend="cuda"), ValueError, "backend is 'cuda': expected one of triton, cpu, reference"),
    "fp64": (bad(backend="cpu"), TypeError, "q is torch.float64: backend 'cpu' takes"),
    "counts-list": (bad(counts=[1, 2]), TypeError, r"counts is a list: expected an int32 or int64 torch.Tensor \[2\]"),
    "counts-float": (bad(counts=torch.ones(2)), TypeError, "counts is torch.float32: expected int32 or int64"),
    "counts-shape": (
        bad(counts=torch.ones(3, dtype=torch.int64)),
        ValueError,
        r"counts has shape \[3\]: expected \[2\]",
    ),
    "counts-device": (
        bad(counts=torch.ones(2, dtype=torch.int64, device="meta")),
        ValueError,
        "counts is on meta and the cache is on cpu",
    ),
    "counts-many": (
        bad(counts=torch.tensor([3, 4])),
        ValueError,
        r"counts is \[3, 4\]: each must be from 0 to the 3 new tokens",
    ),
    "counts-negative": (bad(counts=torch.tensor([-1, 1])), ValueError, r"counts is \[-1, 1\]"),
    "full": (
        cut(draw(), slice(0, 20)),
        ValueError,
        "sequence 0 has 50 tokens and 20 come: max_len is 61; make a longer cache, or reset it",
    ),
    "compress": (bad(), ValueError, r"compress returned v_cmp of shape \[1, 2, 2, 8\]: expected \[1, 2, 2, 5\]"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_leaves_the_cache_as_it_was(arguments, error, message):
    def wrong(k, v):
        return k.mean(2), k.mean(2)

    cache, tensors = make_cache(), draw()
    cache.append(tensors["k"][:, :50], tensors["v"][:, :50])
    if "compress returned" in message:
        cache.compress = wrong
    with pytest.raises(error, match=message):
        nsa_decode_step(**{"cache": cache, "backend": "reference"} | arguments)
    cache.compress = None
    assert cache.lengths.tolist() == [50, 50]
    assert cache.longest == 50
    o = nsa_decode_step(**cut(tensors, slice(50, TOKENS)), cache=cache, backend="reference")
    whole = nsa_decode_step(**tensors, cache=make_cache(), backend="reference")
    torch.testing.assert_close(o, whole[:, 50:], rtol=1e-10, atol=1e-12)


BAD_CACHES = {
    "batch": ({"batch": 0}, ValueError, "batch is 0: expected a whole number of at least 1"),
    "max-len": ({"max_len": 2.5}, TypeError, "max_len is 2.5: expected a whole number"),
    "channels": ({"D": 300}, ValueError, "D is 300: expected 1 to 256 channels"),
    "values": ({"Dv": 0}, ValueError, "Dv is 0"),
    "dtype": ({"dtype": torch.int32}, TypeError, "dtype is torch.int32: expected float16, bfloat16 or float32"),
    "stride": (
        {"compress_stride": 3},
        ValueError,
        "compress_size is 8 and compress_stride is 3: compress_size must be a multiple",
    ),
    "block": ({"block_size": 6}, ValueError, "block_size is 6 and compress_stride is 4: block_size must be a multiple"),
    "forced": ({"init_blocks": 3}, ValueError, "init_blocks is 3, local_blocks is 2 and block_count is 4"),
    "window": ({"window_size": 0}, ValueError, "window_size is 0: expected a whole number of at least 1"),
}


def paging(rows=16, pages=3, **changes):
    """What a cache of two sequences of 9 tokens may be kept in."""
    pools = {"k_pages": torch.ones(pages, rows, 2, 8), "v_pages": torch.ones(pages, rows, 2, 5)}
    return {"page_table": torch.tensor([[2], [0]])} | pools | changes


BAD_CACHES |= {
    "pages-alone": (
        paging(v_pages=None),
        ValueError,
        "page_table, k_pages and v_pages go together: give all three, or none",
    ),
    "pages-list": (paging(k_pages=[1]), TypeError, "k_pages is a list"),
    "pages-heads": (
        paging(v_pages=torch.ones(3, 16, 1, 5)),
        ValueError,
        r"v_pages has shape \[3, 16, 1, 5\]: expected \[pages, page_size, 2, 5\]",
    ),
    "pages-dtype": (
        paging(k_pages=torch.ones(3, 16, 2, 8).half()),
        TypeError,
        "k_pages is torch.float16 and the cache holds torch.float32",
    ),
    "pages-device": (
        paging(k_pages=torch.ones(3, 16, 2, 8, device="meta")),
        ValueError,
        "k_pages is on meta and the cache is on cpu",
    ),
    "pages-expanded": (
        paging(k_pages=torch.ones(1, 16, 2, 8).expand(3, -1, -1, -1)),
        ValueError,
        r"k_pages is expanded, with strides \[0, 16, 8, 1\]: .*; give k_pages.contiguous\(\)",
    ),
    "pages-differ": (
        paging(v_pages=torch.ones(2, 16, 2, 5)),
        ValueError,
        r"k_pages and v_pages must have the same pages \(got shapes k_pages \[3, 16, 2, 8\], v_pages",
    ),
    "page-rows": (paging(rows=12), ValueError, "k_pages has 3 pages of 12 rows: .* of a multiple of 16 rows"),
    "table-dtype": (paging(page_table=torch.ones(2, 1)), TypeError, "page_table is torch.float32: expected int32 or"),
    "table-shape": (paging(page_table=torch.tensor([2, 0])), ValueError, r"page_table has shape \[2\]"),
    "table-short": (
        {"max_len": 17} | paging(),
        ValueError,
        "page_table has room for 1 pages of 16 rows: expected at least 2 pages, for max_len is 17",
    ),
}


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_bad_caches(changes, error, message):
    with pytest.raises(error, match=message):
        NSACache(**{"batch": 2, "max_len": 9, "kv_heads": 2, "D": 8, "Dv": 5} | SMALL | changes)


def test_an_append_of_fp64_is_the_reference_s():
    """Kernels would take means in fp32."""
    cache, tensors = make_cache(), draw()
    with pytest.raises(TypeError, match="the cache is torch.float64: backend 'cpu' takes"):
        cache.append(tensors["k"], tensors["v"], backend="cpu")
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("table", "counts", "message"),
    [
        ([[2], [3]], None, r"page_table holds 3 at \[1, 0\], which entry 1 uses: expected 0 to 2"),
        ([[-1], [0]], None, r"page_table holds -1 at \[0, 0\]"),
        ([[1], [1]], None, "page 1 is written for entry 0, and page_table names it 2 times"),
        ([[1], [-1]], [9, 0], None),
    ],
)
def test_pages_are_checked(table, counts, message):
    """Those that are used: an entry of no tokens may hold anything."""
    cache = NSACache(2, 9, 2, 8, 5, **SMALL, **paging(page_table=torch.tensor(table)))
    k, v = torch.ones(2, 9, 2, 8), torch.ones(2, 9, 2, 5)
    if message is None:
        cache.append(k, v, torch.tensor(counts))
        assert cache.lengths.tolist() == [9, 0]
        assert torch.equal(cache.k[0], k[0])
        return
    with pytest.raises(ValueError, match=message):
        cache.append(k, v)
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("rows", [2, -1, [0, 5], torch.tensor([3]), [0.5], True])
def test_bad_rows(rows):
    with pytest.raises(ValueError, match="expected sequences of the cache, whole numbers from 0 to 1"):
        make_cache().reset(rows)
