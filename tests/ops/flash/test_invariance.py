"""What docs/decoding.md promises bit for bit, and test_decode.py does not ask: neighbours in a pack, left padding, the
cache's layout, how keys came into it, and the size of steps.
"""

import itertools

import numpy as np
import pytest
import torch
from decode_calls import clones, dense

from tilewise import flash_attention, flash_attention_with_kvcache
from tilewise.ops._host.backend import interpreting
from tilewise.ops.flash import configs
from tilewise.ops.flash.hopper import configs as hopper_configs

SPLITS = {"num_splits": 3}


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sequences(device, lengths=(70, 1, 33)):
    """Packed q, k and v, and their offsets."""
    generator = torch.Generator().manual_seed(0)
    made = {x: torch.randn(sum(lengths), n, 16, generator=generator) for x, n in (("q", 4), ("k", 2), ("v", 2))}
    return {name: x.to(device) for name, x in made.items()}, torch.tensor([0, *lengths]).cumsum(0).to(device)


def test_a_sequence_alone_and_in_a_pack(place):
    """And in another one, next to NaN."""
    backend, device = place
    made, ends = sequences(device)
    call = {"causal": True, "return_lse": True, "backend": backend}
    o, lse = flash_attention(**made, cu_seqlens_q=ends, **call)
    for start, end in itertools.pairwise(ends.tolist()):
        alone, tokens = {name: x[start:end] for name, x in made.items()}, end - start
        offsets = torch.tensor([0, tokens], device=device)
        assert same(flash_attention(**alone, cu_seqlens_q=offsets, **call), (o[start:end], lse[:, start:end]))
        packed = {name: torch.nn.functional.pad(x, (0, 0, 0, 0, 5, 9), value=torch.nan) for name, x in alone.items()}
        offsets = torch.tensor([0, 5, 5 + tokens, 14 + tokens], device=device)
        found = flash_attention(**packed, cu_seqlens_q=offsets, **call)
        assert same((found[0][5 : 5 + tokens], found[1][:, 5 : 5 + tokens]), (o[start:end], lse[:, start:end]))


@pytest.mark.parametrize("architecture", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("channels", [16, 64, 96, 128, 256])
def test_the_number_of_keys_decides_by_three_limits(architecture, channels):
    """So the total of a pack does, which flash_attention takes for a sequence's keys."""
    for first, last in ((1, 256), (257, 2048), (2049, 4096), (4097, 10**8)):
        for element_size, capped, left, right in itertools.product((2, 4), *([False, True],) * 3):
            chosen = set()
            for keys in (first, first + 1, (first + last) // 2, last):
                problem = configs.Problem(channels, channels, keys, element_size, True)
                tiles = hopper_configs.choose_forward(channels, channels, keys, capped, left, right)
                own = tiles if hopper_configs.why_not("forward", problem, capped) is None else None
                chosen.add((configs.choose("fwd", problem, architecture), own))
            assert len(chosen) == 1


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (9, 3)} | SPLITS], ids=["causal", "splits"])
def test_packed_queries_over_a_cache_alone_and_together(place, options):
    backend, device = place
    call = dense(device, lengths=(70, 33, 5, 41), queries=0)
    caches = {"k": call["k_cache"], "v": call["v_cache"]}
    q = torch.randn(71, 4, 16, generator=torch.Generator().manual_seed(5)).to(device)
    ends, options = [0, 66, 67, 67, 71], options | {"return_lse": True, "backend": backend}
    entries = {"cu_seqlens_q": torch.tensor(ends, device=device), "seqused_k": call["cache_seqlens"]}
    o, lse = flash_attention(q, **caches, **entries, **options)
    for b in range(4):
        at = slice(ends[b], ends[b + 1])
        mine = {name: x[b : b + 1] for name, x in caches.items()}
        entries = {"cu_seqlens_q": torch.tensor([0, at.stop - at.start], device=device)}
        entries |= {"seqused_k": call["cache_seqlens"][b : b + 1]}
        assert same(flash_attention(q[at], **mine, **entries, **options), (o[at], lse[:, at])), b


def test_left_padding_by_whole_tiles(place):
    backend, device = place
    padding = 128
    call = dense(device, lengths=(90, 90), room=90)
    expected = flash_attention_with_kvcache(**call, **SPLITS, return_lse=True, backend=backend)
    padded = call | {
        "cache_seqlens": call["cache_seqlens"] + padding,
        "leftpad_k": torch.full_like(call["cache_seqlens"], padding),
    }
    for name in ("k_cache", "v_cache"):
        padded[name] = torch.nn.functional.pad(call[name], (0, 0, 0, 0, padding, 0), value=torch.nan)
    assert same(flash_attention_with_kvcache(**padded, **SPLITS, return_lse=True, backend=backend), expected)


def test_the_layout_of_a_cache(place):
    """Heads before tokens, and rows further apart than they are long."""
    backend, device = place
    call = dense(device)
    expected = flash_attention_with_kvcache(**call, return_lse=True, backend=backend)
    for name in ("k_cache", "v_cache"):
        rows = call[name].transpose(1, 2)
        call[name] = torch.cat([rows, rows], -1)[..., : rows.shape[-1]].transpose(1, 2)
    assert same(flash_attention_with_kvcache(**call, return_lse=True, backend=backend), expected)


def test_how_keys_came_into_the_cache(place):
    """In one prefill, in some pieces or one by one: the next step is the same, and so is the cache."""
    backend, device = place
    given = dense(device, lengths=(0, 0), room=40, new=31, queries=31)
    step = dense(device, lengths=(31, 31), room=40, new=1, queries=1, seed=1)
    results = []
    for piece in (31, 8, 1):
        caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
        for start in range(0, 31, piece):
            new = {name: given[name][:, start : start + piece] for name in ("q", "k", "v")}
            flash_attention_with_kvcache(**new, **caches, cache_seqlens=start, backend=backend)
        call = clones(step) | caches
        o, lse = flash_attention_with_kvcache(**call, return_lse=True, backend=backend)
        results.append((o, lse, *(caches[name].nan_to_num(9.0) for name in caches)))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def by_rows(a, b, dtype=None, **_):
    """A product in which a row's sums do not depend on where the row stands, as those of a BLAS do."""
    return (a[..., :, None].astype(dtype) * b[..., None, :, :].astype(dtype)).sum(-2)


@pytest.mark.slow
@pytest.mark.skipif(not interpreting(), reason="on a GPU products are its own")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_any_size_add_up_the_same_tiles(dtype, monkeypatch):
    """Without splits every token, and with them those in steps of up to 16 rows of a KV head: what is left to differ is
    how a product sums up tiles of different heights.
    """
    monkeypatch.setattr(np, "matmul", by_rows)
    generator = torch.Generator().manual_seed(0)
    tokens, heads = 650, {"q": 4, "k": 1, "v": 1}
    made = {name: torch.randn(1, tokens, n, 16, generator=generator).to(dtype) for name, n in heads.items()}

    def outputs(size, **options):
        found = []
        for token in (0, 127, 130, 511, 515, 649):
            start = token // size * size
            end = min(start + size, tokens)
            q = made["q"][:, start:end]
            o = flash_attention_with_kvcache(q, made["k"], made["v"], cache_seqlens=end, backend="triton", **options)
            found.append(o[0, token - start])
        return torch.stack(found)

    whole, unsplit, split = outputs(tokens), outputs(1, num_splits=1), outputs(1)
    assert torch.equal(unsplit, whole)
    assert torch.equal(outputs(16, num_splits=1), whole)
    assert torch.equal(outputs(100), whole)
    assert torch.equal(outputs(3), split)
    assert torch.equal(outputs(4), split)
    # By splits a token's sums differ: the promise ends here.
    assert not torch.equal(split, whole)
    torch.testing.assert_close(split, whole, atol=2e-2 if dtype == torch.bfloat16 else 2e-6, rtol=0)
