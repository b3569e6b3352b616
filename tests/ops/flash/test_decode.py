"""Attention over a cache: what an entry's result may depend on, what is written, and what is never touched."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from decode_calls import clones, dense, paged

from tilewise import flash_attention, flash_attention_with_kvcache
from tilewise.ops._host.launching import capture
from tilewise.ops.flash.decode import configs, launch
from tilewise.ops.flash.decode.kernels import Entry, Rule, Shape, split_keys

# By the triton backend, short entries have several splits too.
SPLITS = {"num_splits": 3}


def run(call, backend, **options):
    return flash_attention_with_kvcache(**call, **options, return_lse=True, backend=backend)


def same(a, b):
    return all(torch.equal(x.nan_to_num(9.0, 8.0, 7.0), y.nan_to_num(9.0, 8.0, 7.0)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", [{}, SPLITS, {"window_size": (20, -1)} | SPLITS], ids=["", "splits", "window"])
def test_an_entry_depends_on_nothing_but_itself(place, options):
    """On neither the batch, nor the cache's room, nor where its pages lie."""
    backend, device = place
    call = dense(device)
    o, lse = run(call, backend, **options)
    assert o.isfinite().all()
    assert same(run(call, backend, **options), (o, lse))
    for b in range(len(o)):
        alone = {name: x[b : b + 1] for name, x in call.items()}
        roomy = {name: torch.nn.functional.pad(alone[name], (0, 0, 0, 0, 0, 200)) for name in ("k_cache", "v_cache")}
        assert same(run(alone | roomy, backend, **options), (o[b : b + 1], lse[b : b + 1])), b
    assert same(run(paged(call), backend, **options), (o, lse))
    assert same(run(paged(call, page_size=256), backend, **options), (o, lse))


@pytest.mark.gpu
def test_splits_follow_an_entrys_own_length(device):
    """Long enough to be split without being asked: the same as alone, in pages, and next to longer ones."""
    call = dense(device, lengths=(1600, 515, 3), room=1700, queries=1)
    whole = run(call, "triton")
    assert configs.most_splits(1, 2, 2, 1700, 0, 64) > 3
    for b in range(3):
        alone = {name: x[b : b + 1] for name, x in call.items()}
        assert same(run(alone, "triton"), tuple(x[b : b + 1] for x in whole)), b
    assert same(run(paged(call), "triton"), whole)
    for unsplit, split in zip(run(call, "triton", num_splits=1), whole, strict=True):
        torch.testing.assert_close(unsplit, split, atol=2e-6, rtol=2e-6)


def test_new_keys_are_written_where_they_belong_and_nowhere_else(place):
    backend, device = place
    call = dense(device, new=3, queries=2)
    before = clones(call)
    o, lse = run(call, backend)
    expected = clones(before)
    for b, length in enumerate(before["cache_seqlens"].tolist()):
        for cache, new in (("k_cache", "k"), ("v_cache", "v")):
            expected[cache][b, length : length + 3] = before[new][b]
    assert all(torch.equal(call[name].nan_to_num(9.0), expected[name].nan_to_num(9.0)) for name in call)
    # What has been written is attended to as if it had always been there.
    stepwise = {name: x for name, x in expected.items() if name not in ("k", "v")}
    stepwise["cache_seqlens"] = stepwise["cache_seqlens"] + 3
    assert same(run(stepwise, backend), (o, lse))
    # And so in pages.
    pages = paged(before, new=3)
    assert same(run(pages, backend), (o, lse))
    table = pages["page_table"]
    for b, length in enumerate(before["cache_seqlens"].tolist()):
        for i, (cache, new) in itertools.product(range(3), (("k_cache", "k"), ("v_cache", "v"))):
            page = table[b, (length + i) // 16]
            assert torch.equal(pages[cache][page, (length + i) % 16], before[new][b, i])


def test_one_number_for_all_lengths(place):
    backend, device = place
    call = dense(device, lengths=(33, 33), new=1, queries=1)
    expected = run(clones(call), backend)
    assert same(run(call | {"cache_seqlens": 33}, backend), expected)


def test_empty_calls(place):
    backend, device = place
    o, lse = run(dense(device, lengths=(), room=8), backend)
    assert (o.shape, lse.shape) == ((0, 2, 4, 24), (0, 4, 2))
    o, lse = run(dense(device, lengths=(5, 3), queries=0), backend)
    assert (o.shape, lse.shape) == ((2, 0, 4, 24), (2, 4, 0))
    o, lse = run(dense(device, lengths=(0, 0), room=0), backend)
    assert not o.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("splits", [0, 3])
def test_a_sink_may_be_any_finite_number(place, splits):
    backend, device = place
    # The largest are beyond fp32 in base 2; the first entry has no keys.
    sinks = torch.tensor([3.4e38, -3.4e38, -torch.inf, 0.5], device=device)
    call = dense(device, lengths=(0, 70))
    o, lse = run(call, backend, sinks=sinks, num_splits=splits)
    assert torch.equal(lse[0], sinks[:, None].expand_as(lse[0]))
    assert not o[0].any()
    truth, true_lse = run(call, "reference", sinks=sinks)
    torch.testing.assert_close((o, lse), (truth, true_lse), rtol=1e-4, atol=1e-5)


def packed_queries(device):
    """Of a long prefill, one token and none, over caches of more keys."""
    call = dense(device, lengths=(70, 33, 5, 41), queries=0)
    q = torch.randn(71, 4, 16, generator=torch.Generator().manual_seed(5)).to(device)
    cu = torch.tensor([0, 66, 67, 67, 71], device=device)
    pages = paged(call)
    keys = {"k": call["k_cache"], "v": call["v_cache"]}, {"k": pages["k_cache"], "v": pages["v_cache"]}
    shared = {"q": q, "cu_seqlens_q": cu, "seqused_k": call["cache_seqlens"], "return_lse": True}
    return keys[0] | shared, keys[1] | shared | {"page_table": pages["page_table"]}


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, 3)} | SPLITS], ids=["causal", "splits"])
def test_packed_queries_over_a_cache(place, options):
    backend, device = place
    in_rows, in_pages = packed_queries(device)
    o, lse = flash_attention(**in_rows, **options, backend=backend)
    assert same(flash_attention(**in_pages, **options, backend=backend), (o, lse))
    expected = flash_attention(**in_rows, **options, backend="reference")
    for x, y in zip((o, lse), expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-6, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_splits_without_a_cache_have_gradients(device, packed):
    generator = torch.Generator().manual_seed(0)
    rows = {"q": (80,), "k": (113,), "v": (113,)} if packed else {"q": (2, 40), "k": (2, 70), "v": (2, 70)}
    heads = {"q": (4, 16), "k": (2, 16), "v": (2, 24)}
    leaves = {x: torch.randn(*rows[x], *heads[x], generator=generator).to(device).requires_grad_() for x in "qkv"}
    leaves["sinks"] = torch.randn(4, generator=generator).to(device).requires_grad_()
    cu = {"cu_seqlens_q": [0, 5, 5, 71, 80], "cu_seqlens_k": [0, 70, 73, 73, 113]} if packed else {}
    offsets = {name: torch.tensor(ends, device=device) for name, ends in cu.items()}
    results = []
    for backend, splits in (("triton", 3), ("reference", 0)):
        o = flash_attention(**leaves, **offsets, causal=True, num_splits=splits, backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), list(leaves.values()))))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_flash_attention_says_what_goes_together():
    in_rows, in_pages = packed_queries("cpu")
    with pytest.raises(ValueError, match="cu_seqlens_k is given with seqused_k, leftpad_k or page_table"):
        flash_attention(**in_rows, cu_seqlens_k=in_rows["cu_seqlens_q"])
    with pytest.raises(ValueError, match="page_table is given without seqused_k"):
        flash_attention(**in_pages | {"seqused_k": None})
    with pytest.raises(ValueError, match="cu_seqlens_q holds 3"):
        flash_attention(**in_rows | {"cu_seqlens_q": torch.tensor([0, 66, 67, 71])})
    with pytest.raises(RuntimeError, match="k requires grad: flash_attention with seqused_k, .* is for inference"):
        flash_attention(**in_rows | {"k": in_rows["k"].clone().requires_grad_()})


def unchecked(call, added, splits=0):
    """The launcher itself, which checks no values, on CPU tensors too."""
    names = ("q", "k_cache", "v_cache", None, "cache_seqlens", "leftpad_k", "page_table", None)
    tensors = (call.get(name) for name in names)
    inputs = launch.make_inputs(*tensors, added, True, -1, -1, 0.25, 0.0, splits)
    return launch.append_forward(inputs, call["k"], call["v"]) if "k" in call else launch.forward(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(90, -5, 2**40, 79), (81, -(2**40), 78, 0)])
@pytest.mark.parametrize("in_pages", [False, True])
def test_lengths_out_of_range_stay_in_their_tensors(device, lengths, in_pages):
    """Neither read nor written outside: memory around the caches holds NaN, and keeps it."""
    call = dense(device, lengths=(40, 12, 17, 70), new=3)
    call = paged(call, new=3) if in_pages else call
    for name in ("k_cache", "v_cache"):
        x = call[name].nan_to_num(1.0)
        memory = torch.full((x.numel() + 2048,), torch.nan, device=device)
        call[name] = memory[1024:-1024].view(x.shape).copy_(x)
        call[f"around {name}"] = memory
    if in_pages:
        table = call["page_table"].clamp(min=0)
        table[0, 0], table[1, 1] = 10**6, -7
        call["page_table"] = table
    call["cache_seqlens"] = torch.tensor(lengths, device=device)
    o, _ = unchecked(call, 0)
    assert o.isfinite().all()
    for name in ("k_cache", "v_cache"):
        around = call[f"around {name}"]
        assert around[:1024].isnan().all()
        assert around[-1024:].isnan().all()


@pytest.mark.gpu
def test_keys_in_pages_out_of_range_do_not_exist(device):
    call = paged(dense(device, lengths=(40, 33)))
    table = call["page_table"]
    # Entry 0 loses its first page, so that it is as if it had that many keys less, and all of them stood at its end.
    table[0, 0] = 10**6
    o, lse = unchecked(call, 0)
    rest = clones(call)
    rest["page_table"] = torch.roll(table[:1], -1, 1)
    rest |= {"q": call["q"][:1], "cache_seqlens": torch.tensor([24], device=device)}
    expected = unchecked(rest, 0)
    for x, y in zip((o[:1], lse[:1]), expected, strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-6)


def splits_of(queries, group, kv_heads, keys):
    """The kernels' rule, written once more: how many splits an entry has."""
    rows = queries * group
    tiles = kv_heads * -(-rows // 16)
    most = max(1, 264 // tiles) if queries <= 64 else 1
    chunk = max(-(-keys // most), 512 if rows <= 16 else 64 * rows, min(-(-keys // max(1, 128 // tiles)), 2048))
    chunk = -(-chunk // 64) * 64
    return max(1, -(-keys // chunk))


@triton.jit
def one_split(ends, n_queries, n_keys, left, SHAPE: tl.constexpr, RULE: tl.constexpr):
    splits = split_keys(n_queries, Entry(0, 0, n_keys), left, SHAPE, RULE)
    tl.store(ends, splits.low)
    tl.store(ends + 1, splits.low + splits.chunk)
    tl.store(ends + 2, splits.count)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [64, 65, 1_047_000, 2**20 - 1])
def test_the_split_of_a_long_prefill_ends_behind_its_keys(device, queries):
    """64 query heads a KV head behind 10 million keys: rows of queries times keys do not fit 32 bits."""
    ends = torch.zeros(3, dtype=torch.int64, device=device)
    shape = Shape(*[None] * len(Shape._fields))._replace(BLOCK_N=64, GROUP=64)
    keys = configs.WORK, configs.ENOUGH, configs.LONG_KEYS, configs.LEAST_KEYS, configs.KEYS_A_ROW
    rule = Rule(None, configs.SPLIT_TOKENS, 1, *keys)
    one_split[(1,)](ends, queries, 10**7, 1000, shape, rule)
    low, high, count = ends.tolist()
    assert low <= 10**7 - queries - 1000 < low + 64
    assert 10**7 <= high < 10**7 + 2**28
    assert count == 1


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 1), (4, 8), (7, 3), (128, 1), (1, 600)])
def test_there_is_room_for_every_split(group, kv_heads):
    room = 400_000
    for queries in (1, 2, 3, 4, 5, 16, 17, 63, 64, 65):
        most = configs.most_splits(queries, group, kv_heads, room, 0, 64)
        for keys in (0, 1, 255, 256, 257, 4096, 32_768, 39_999, 131_072, room):
            assert splits_of(queries, group, kv_heads, keys) <= most
            # Packed, an entry's rows fit into its region, whatever others share the batch.
            packed = configs.most_splits(1, group, kv_heads, room, 0, 64)
            count = splits_of(queries, group, kv_heads, keys)
            region = launch.packed_region(packed, kv_heads * group, 1000)
            assert count == 1 or count * queries * kv_heads * group <= region


def test_a_step_reads_its_keys_once_for_a_whole_group():
    """One tile holds all query heads of a KV head, and several tokens; nothing is merged where there is one split."""
    for queries, heads, expected in ((1, 32, 8), (4, 32, 8), (1, 64, 8)):
        call = dense("meta", lengths=(0,) * 2, room=200, queries=queries, heads=heads, kv_heads=8)
        with capture(90) as launches:
            unchecked(call, 200)
        assert [one.grid for one in launches] == [2 * expected]
