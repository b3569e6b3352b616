"""The kernels of decoding over an NSACache: right, and what a sequence's result may depend on; what a full cache does,
how many launches a step is. Fresh memory is NaN here, so caches are poisoned behind their lengths.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import NSACache, nsa_decode_step
from tilewise.ops._host.launching import capture
from tilewise.ops.nsa import launch as training
from tilewise.ops.nsa import reference
from tilewise.ops.nsa.cached import launch
from tilewise.ops.nsa.cached import reference as plain

SMALL = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 8,
    "block_count": 4,
    "window_size": 11,
    "init_blocks": 1,
    "local_blocks": 2,
}
SIZES = {
    "small": SMALL,
    "long-windows": SMALL | {"compress_size": 16, "compress_stride": 2, "block_size": 4, "block_count": 7},
    "nothing-forced": SMALL | {"init_blocks": 0, "local_blocks": 0, "block_count": 2},
    "no-window-yet": SMALL | {"compress_size": 64, "compress_stride": 32, "block_size": 32},
}
TOKENS, ROOM, BATCH, HEADS, KV_HEADS, D, DV = 61, 70, 3, 6, 2, 8, 5
LENGTHS = (58, 0, 17)
GATES = ("g_cmp", "g_slc", "g_swa")

pytestmark = pytest.mark.gpu


def draw(tokens=TOKENS, batch=BATCH, seed=0, heads=HEADS, kv_heads=KV_HEADS):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (heads, D), "k": (kv_heads, D), "v": (kv_heads, DV)} | dict.fromkeys(GATES, (heads,))
    return {name: torch.randn(batch, tokens, *shape, generator=generator) for name, shape in shapes.items()}


def rows(tensors, lengths, count, batch=slice(None)):
    """`count` tokens of each sequence, behind so many."""
    at = torch.tensor(lengths)[:, None] + torch.arange(count)
    return {name: x[torch.arange(len(x))[:, None], at][batch] for name, x in tensors.items()}


def put(tensors, device):
    return {name: x if x is None else x.to(device) for name, x in tensors.items()}


def make_cache(device, tensors, lengths=LENGTHS, room=ROOM, pages=0, **more):
    """A cache that holds so many tokens of each sequence; with pages of so many rows in an order of their own."""
    k, v = tensors["k"], tensors["v"]
    batch, kv_heads = len(lengths), k.shape[2]
    paged = {}
    if pages:
        width = -(-room // pages)
        table = torch.randperm(batch * width + 2, generator=torch.Generator().manual_seed(9))[: batch * width]
        shape = (batch * width + 3, pages, kv_heads)
        # What lies behind a pool is NaN too.
        pools = [x.new_full((*shape, x.shape[-1]), torch.nan).to(device)[:-1] for x in (k, v)]
        paged = {"page_table": table.view(batch, width).to(device), "k_pages": pools[0], "v_pages": pools[1]}
    cache = NSACache(batch, room, kv_heads, D, DV, **{**SMALL, **more}, **paged, device=device)
    longest = max(lengths)
    # By torch's own operators: interpreted kernels would take seconds.
    backend = "cpu" if device.type == "cpu" else None
    cache.append(k[:, :longest].to(device), v[:, :longest].to(device), torch.tensor(lengths), backend=backend)
    return cache


def step(new, cache, device, **options):
    o, indices = nsa_decode_step(**put(new, device), cache=cache, **options, return_indices=True, backend="triton")
    return o.cpu(), indices.cpu()


def patch_launches(monkeypatch, **constants):
    """Plans that read other constants, and run as they stand: programs would be those of the constants before."""
    for name in ("write", "attend", "commit"):
        monkeypatch.setattr(launch, name, getattr(launch, f"plan_{name}"))
    for name, value in constants.items():
        monkeypatch.setattr(launch, name, value)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_step_is_the_whole_sequence_s(sizes, device):
    """Two tokens after prompts of different lengths, judged by fp64 and eager torch's own error."""
    tensors = draw()
    o, indices = step(rows(tensors, LENGTHS, 2), make_cache(device, tensors, **sizes), device)
    assert o.isfinite().all()
    for dtype in (torch.float64, torch.float32):
        whole = {name: x.to(dtype) for name, x in tensors.items()}
        found, choices = reference.native_sparse_attention(**whole, **sizes)
        at = torch.tensor(LENGTHS)[:, None] + torch.arange(2)
        found, choices = found[torch.arange(3)[:, None], at], choices[torch.arange(3)[:, None], at]
        if dtype == torch.float64:
            truth = found
            assert torch.equal(indices, choices)
    eager = (found.double() - truth).abs().max()
    assert (o.double() - truth).abs().max() <= 4 * eager + 1e-6


@pytest.mark.parametrize("left_out", [("g_cmp",), ("g_slc",), ("g_cmp", "g_slc"), ("g_slc", "g_swa")], ids="-".join)
@pytest.mark.parametrize("scale", [-1.5])
def test_gates_of_none_and_a_negative_scale(left_out, scale, device):
    tensors = draw()
    given = tensors | dict.fromkeys(left_out)
    new = {name: x for name, x in rows(tensors, LENGTHS, 1).items() if name not in left_out} | dict.fromkeys(left_out)
    cache = make_cache(device, tensors)
    o = nsa_decode_step(**put(new, device), cache=cache, scale=scale, backend="triton").cpu()
    truth, _ = reference.native_sparse_attention(
        **{name: x if x is None else x.double() for name, x in given.items()}, **SMALL, scale=scale
    )
    torch.testing.assert_close(o[:, 0].double(), truth[torch.arange(3), torch.tensor(LENGTHS)], atol=3e-6, rtol=3e-6)


def many_windows(**more):
    """Sizes whose windows are split in three behind 1,100 tokens."""
    return {"compress_size": 4, "compress_stride": 2, "block_size": 16, "window_size": 150, "block_count": 12} | more


def test_a_sequence_depends_on_nothing_but_itself(device, monkeypatch):
    """On neither the batch, nor the cache's room, nor where its pages lie, nor how many tokens come at once."""
    # So few that they are merged in several steps.
    patch_launches(monkeypatch, MERGED=2, WEIGHED_SPLITS=2)
    lengths = (1100, 0, 530)
    tensors = draw(tokens=1103, heads=2, kv_heads=1)
    # The last split's scores are the highest: what was merged before it is scaled down.
    tensors["k"][:, 1030:] *= 4.0
    sizes = many_windows()
    new = rows(tensors, lengths, 2)
    o, indices = step(new, make_cache(device, tensors, lengths, 1200, **sizes), device)
    assert o.isfinite().all()
    paged = make_cache(device, tensors, lengths, 1200, pages=16, **sizes)
    assert same(step(new, paged, device), (o, indices))
    alone = make_cache(device, {name: x[:1] for name, x in tensors.items()}, lengths[:1], 2500, pages=48, **sizes)
    for i in range(2):
        one = step({name: x[:1, i : i + 1] for name, x in new.items()}, alone, device)
        assert same(one, (o[:1, i : i + 1], indices[:1, i : i + 1])), i
    whole = {name: x[:, :1102].double() for name, x in tensors.items()}
    truth, choices = reference.native_sparse_attention(**whole, **SMALL | sizes)
    torch.testing.assert_close(o[0].double(), truth[0, 1100:], atol=3e-6, rtol=3e-6)
    assert torch.equal(indices[0], choices[0, 1100:])


def test_blocks_share_all_probability(device, monkeypatch):
    """What a token's blocks score adds up to one a head and stride of a window, whatever the splits."""
    lengths = (1100, 9)
    tensors = draw(tokens=1101, batch=2, heads=2, kv_heads=1)
    tensors["k"][:, 1030:] *= 4.0
    seen, emit = [], launch.emit
    patch_launches(
        monkeypatch, WEIGHED_SPLITS=1, emit=lambda beside, *given: (seen.extend(given), emit(beside, *given))
    )
    cache = make_cache(device, tensors, lengths, 1101, **many_windows())
    step(rows(tensors, lengths, 1), cache, device)
    importance = next(one.arguments["importance"] for one in seen if "importance" in one.arguments).view(2, -1)
    for row, length in zip(importance, lengths, strict=True):
        assert abs(float(row[: length // 16 + 1].sum()) - 4.0) < 1e-4


@pytest.mark.parametrize("pages", [0, 16], ids=["dense", "paged"])
def test_rows_means_and_lengths_are_those_of_torch(pages, device):
    """Stored by kernels, as by torch: windows that end within and between steps, counts, a prompt."""
    tensors = draw(kv_heads=1)
    ours, theirs = (make_cache(device, tensors, (0, 0, 0), pages=pages) for _ in range(2))
    at = torch.zeros(3, dtype=torch.int64)
    for n, counts in ((37, (37, 0, 9)), (3, None), (1, None), (1, (0, 1, 1)), (4, (4, 2, 4))):
        new = put(rows(tensors, at.tolist(), n), device)
        given = None if counts is None else torch.tensor(counts, device=device)
        ours.append(new["k"], new["v"], given, backend="triton")
        theirs.append(new["k"], new["v"], given, backend="reference")
        at += n if counts is None else torch.tensor(counts)
        assert torch.equal(ours.lengths.cpu(), at)
    for name in ("k", "v", "k_cmp", "v_cmp"):
        for b, length in enumerate(at.tolist()):
            own = ours.windows(length) if "cmp" in name else length
            a, b = (getattr(cache, name)[b, :own] for cache in (ours, theirs))
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_are_the_bits_of_training(dtype, device):
    """Whatever the steps that a window came in."""
    tensors = {name: x.to(dtype) for name, x in draw(tokens=40, batch=1, kv_heads=1).items()}
    cache = make_cache(device, tensors, (0,), dtype=dtype, pages=16)
    for first, n in ((0, 21), (21, 1), (22, 4), (26, 13)):
        cache.append(*(tensors[name][:, first : first + n].to(device) for name in "kv"), backend="triton")
    for name in "kv":
        means = training.compress(tensors[name][:, :39].to(device), None, None, 8, 4)
        assert torch.equal(getattr(cache, f"{name}_cmp")[:, : means.shape[1]], means)


def learned(k, v):
    weight = torch.linspace(-1, 2, k.shape[2], dtype=k.dtype, device=k.device)[:, None, None]
    return (k * weight).sum(2).sin(), (v * weight).sum(2).cos()


def test_learned_compression(device):
    tensors = draw(kv_heads=1)
    # No room behind the last window: one more would be another sequence's.
    ours, theirs = (make_cache(device, tensors, (13, 4, 0), room=21, compress=learned) for _ in range(2))
    for n, counts in ((6, (6, 4, 1)), (1, (1, 0, 1)), (1, (1, 1, 1))):
        new = put(rows(tensors, theirs.lengths.tolist(), n), device)
        o = [
            nsa_decode_step(**new, cache=cache, counts=torch.tensor(counts), backend=backend)
            for cache, backend in ((ours, "triton"), (theirs, "reference"))
        ]
        torch.testing.assert_close(*o, atol=3e-6, rtol=3e-6)
    assert torch.equal(ours.lengths, theirs.lengths)


@pytest.mark.parametrize(("backend", "pages"), [("triton", 0), ("triton", 16), ("reference", 0)])
def test_a_full_sequence_where_values_are_not_checked(backend, pages, device, monkeypatch):
    """What has no room is not stored and gives 0; the others go on; check() names the sequence."""
    monkeypatch.setattr("tilewise.ops._host.checks.values_are_checked", lambda x: False)
    lengths, tensors = (20, 19, 3), draw(tokens=24)
    cache = make_cache(device, tensors, lengths, room=21, pages=pages)
    before = [x.clone() for x in (cache.k, cache.v)]
    cache.check()
    new = put(rows(tensors, lengths, 2), device)
    o, indices = nsa_decode_step(**new, cache=cache, return_indices=True, backend=backend)
    assert cache.lengths.tolist() == [21, 21, 5]
    assert not o[0, 1].any()
    assert (indices[0, 1] == -1).all()
    assert o[0, 0].all()
    assert o[1:].all()
    for x, old in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(x[0, :20], old[0, :20])
    # Said once, it is not taken back.
    cache.append(new["k"], new["v"], torch.tensor([0, 0, 1], device=device), backend=backend)
    with pytest.raises(ValueError, match="sequence 0 is full: .* max_len is 21; make a longer cache, or reset it"):
        cache.check()
    cache.reset(0)
    cache.check()
    assert cache.lengths.tolist() == [0, 21, 6]
    # Lengths and counts that make no sense lead nowhere.
    cache.lengths.copy_(torch.tensor([2**40, -7, 5]))
    counts = torch.tensor([-3, 2**40, 1], device=device)
    cache.append(new["k"], new["v"], counts, backend="triton")
    assert cache.lengths.tolist() == [21, 2, 6]


def test_pages_out_of_range_are_neither_read_nor_written(device, monkeypatch):
    monkeypatch.setattr("tilewise.ops._host.checks.values_are_checked", lambda x: False)
    tensors = draw(tokens=24)
    cache = make_cache(device, tensors, (20, 15, 3), pages=16)
    table = cache.stored.table
    table[0, 1], table[1, 1], table[2, 1] = len(cache.stored.k), -1, -5
    new = put(rows(tensors, (20, 15, 3), 1), device)
    before = [x.clone() for x in (cache.stored.k, cache.stored.v)]
    o = [
        nsa_decode_step(**new, cache=one, backend=backend)
        for one, backend in ((cache, "triton"), (cache_like(cache), "reference"))
    ]
    torch.testing.assert_close(*o, atol=3e-6, rtol=3e-6)
    for x, old in zip((cache.stored.k, cache.stored.v), before, strict=True):
        changed = (x.nan_to_num(7.0) != old.nan_to_num(7.0)).flatten(2).any(-1).nonzero().tolist()
        assert sorted(changed) == sorted([[int(table[1, 0]), 15], [int(table[2, 0]), 3]])
    with pytest.raises(ValueError, match=r"sequence 0 has tokens in pages out of range, .* expected 0 to 16"):
        cache.check()


def cache_like(cache):
    """Another one that holds the same, windows too."""
    stored = cache.stored
    copies = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in stored._asdict().items()}
    other = object.__new__(NSACache)
    other.__dict__ |= cache.__dict__ | {"stored": type(stored)(**copies)}
    return other


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", 1), ("MOST_BLOCKS", 4)])
def test_what_does_not_fit_is_taken_in_chunks(limit, value, device, monkeypatch):
    """New tokens; blocks to choose from."""
    tensors = draw(kv_heads=1, heads=2)
    new = rows(tensors, LENGTHS, 3)
    whole = step(new, make_cache(device, tensors), device)
    patch_launches(monkeypatch, **{limit: value})
    assert same(step(new, make_cache(device, tensors), device), whole)


class Seen(TorchDispatchMode):
    """Operators that torch runs."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_a_step_is_seven_launches_and_nothing_else(paged):
    """Whatever torch runs besides would be launched too, or wait for the device."""
    pools = [torch.empty(2 * 2048, 64, 4, 128, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    table = torch.empty(2, 2048, dtype=torch.int32, device="meta")
    paging = {"page_table": table, "k_pages": pools[0], "v_pages": pools[1]} if paged else {}
    cache = NSACache(2, 131072, 4, 128, 128, **paging, dtype=torch.bfloat16, device="meta")
    made = {"q": (64, 128), "k": (4, 128), "v": (4, 128)} | dict.fromkeys(GATES, (64,))
    new = {name: torch.empty(2, 1, *shape, dtype=torch.bfloat16, device="meta") for name, shape in made.items()}
    with capture(90) as launches, Seen() as seen:
        nsa_decode_step(**new, cache=cache, backend="triton")
    assert [one.kernel.__name__.removeprefix("nsa_cached_") for one in launches] == [
        "write_kernel",
        "scores_kernel",
        "importance_kernel",
        "choose_kernel",
        "attend_kernel",
        "combine_kernel",
        "commit_kernel",
    ]
    assert seen.names <= {"empty", "new_empty"}
    # One sequence of 131,072 tokens keeps an H200's 132 SMs busy where the bytes are: its windows.
    assert launches[1].grid == 2 * 128


def test_a_window_s_splits_fit_their_room():
    """The kernels' rule, written once more."""
    for kv_heads, group, room in ((1, 1, 10**6), (4, 16, 131072), (8, 40, 5000), (300, 1, 10**5), (1, 1, 9)):
        rule = launch._rule(kv_heads, group, 128)
        stored = plain.Stored(*[torch.empty(1, 1, kv_heads, 4, device="meta")] * 4, None, None, None, room)
        gates = (torch.empty(0), None, None)
        parts = launch.layout(stored, gates, kv_heads * group, launch.Sizes(32, 16, 64, 16, 1, 2), 512)
        for seen in {0, 1, 255, 256, 257, launch.window_count(room, 32, 16)}:
            if seen <= launch.window_count(room, 32, 16):
                chunk = -(-max(-(-seen // rule.MOST), rule.LEAST) // rule.TILE) * rule.TILE
                assert -(-seen // chunk) <= parts.splits


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_lengths_set_back_forget_tokens(backend, device):
    """Drafts that were refused, with the windows that they had made whole."""
    tensors, drafts = draw(kv_heads=1, heads=2), draw(tokens=6, seed=1, kv_heads=1, heads=2)
    straight, tried = (make_cache(device, tensors) for _ in range(2))
    tried.append(drafts["k"].to(device), drafts["v"].to(device), backend=backend)
    lengths = tried.lengths
    tried.lengths -= torch.tensor([5, 6, 4], device=device)
    assert tried.lengths is lengths
    assert tried.lengths.tolist() == [59, 0, 19]
    tried.lengths = straight.lengths
    assert tried.lengths is lengths
    for i in range(2):
        new = put(rows(tensors, [n + i for n in LENGTHS], 1), device)
        o = [nsa_decode_step(**new, cache=cache, backend=backend) for cache in (straight, tried)]
        assert torch.equal(*o)


def test_inside_torch_compile_it_runs_as_it_stands(device):
    """Between two graphs: kernels are no operators of torch's, and a graph would not know what they change."""
    tensors = draw(kv_heads=1, heads=2)
    eager, compiled = (make_cache(device, tensors) for _ in range(2))

    def doubled(new, cache):
        cache.append(new["k"], new["v"], backend="triton")
        return 2 * nsa_decode_step(**new, cache=cache, backend="triton")

    for i in range(2):
        new = put(rows(tensors, [n + i for n in LENGTHS], 1), device)
        assert torch.equal(torch.compile(doubled, backend="aot_eager")(new, compiled), doubled(new, eager))
    assert torch.equal(compiled.lengths, eager.lengths)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pages", [0, 64], ids=["dense", "paged"])
def test_a_captured_step_replays_with_other_lengths(device, pages):
    """Lengths move on inside the graph; prompts of other lengths, other tokens, and a full cache need no new one."""
    tensors = draw(tokens=2000)
    static = put(rows(tensors, (5, 5, 5), 1), device)
    cache = make_cache(device, tensors, (5, 5, 5), room=1990, pages=pages)
    nsa_decode_step(**static, cache=cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A wait for the device would end the capture.
    with torch.cuda.graph(graph):
        o = nsa_decode_step(**static, cache=cache)
    for lengths in ((1985, 0, 700), (3, 1500, 64)):
        cache.reset()
        prompt = {name: tensors[name][:, : max(lengths)].to(device) for name in ("k", "v")}
        cache.append(**prompt, counts=torch.tensor(lengths))
        other = make_cache(device, tensors, lengths, room=1990, pages=pages)
        for i in range(7):
            new = put(rows(tensors, [n + i for n in lengths], 1), device)
            for name, x in new.items():
                static[name].copy_(x)
            graph.replay()
            assert torch.equal(o, nsa_decode_step(**new, cache=other)), (lengths, i)
        assert torch.equal(cache.lengths, other.lengths)
    cache.check()
    cache.lengths[0] = 1990
    graph.replay()
    assert not o[0].any()
    with pytest.raises(ValueError, match="sequence 0 is full"):
        cache.check()
