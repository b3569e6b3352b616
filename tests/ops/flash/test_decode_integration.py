"""Attention over a cache inside torch: its operators, torch.compile, gradients, autocast, CUDA graphs."""

import pytest
import torch
from decode_calls import clones, dense, paged
from torch import library

from tilewise import flash_attention_with_kvcache
from tilewise.ops.flash.decode import api


def operator_arguments(backend, device, *, append, pages=False):
    call = dense(device, lengths=(20, 3), room=32, new=2 if append else 0)
    call = paged(call, new=2) if pages else call
    # NaN equals nothing, not even itself.
    call = {name: x.nan_to_num(0.0) if x.is_floating_point() else x for name, x in call.items()}
    new = (call["k"], call["v"]) if append else ()
    entries = None, call["cache_seqlens"], None, call.get("page_table"), None, None
    return call["q"], call["k_cache"], call["v_cache"], *new, *entries, 0, True, -1, -1, 0.25, 0.0, 0, backend


@pytest.mark.parametrize("pages", [False, True], ids=["dense", "paged"])
def test_opcheck(place, pages):
    backend, device = place
    library.opcheck(api.flash_decode.overload, operator_arguments(backend, device, append=False, pages=pages))
    library.opcheck(api.flash_decode_append.overload, operator_arguments(backend, device, append=True, pages=pages))


def test_a_compiled_step_writes_too(place):
    backend, device = place
    call = dense(device, lengths=(20, 3), room=32, new=1, queries=1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q, k_cache, v_cache, k, v, cache_seqlens):
        o = flash_attention_with_kvcache(q * 2, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, backend=backend)
        # Reads what has been written.
        return o, k_cache[0, 20] + 0

    expected = clones(call)
    o = flash_attention_with_kvcache(**expected | {"q": call["q"] * 2}, backend=backend)
    with torch.no_grad():
        compiled, row = step(**call)
    assert torch.equal(compiled, o)
    assert torch.equal(row, call["k"][0, 0])
    assert torch.equal(call["k_cache"].nan_to_num(9.0), expected["k_cache"].nan_to_num(9.0))


def test_it_is_for_inference(place):
    backend, device = place
    for name in ("q", "k_cache", "k"):
        call = dense(device, lengths=(20, 3), room=32, new=1)
        call[name].requires_grad_()
        with pytest.raises(RuntimeError, match=f"{name} requires grad.*under torch.no_grad"):
            flash_attention_with_kvcache(**call, backend=backend)
        with torch.no_grad():
            flash_attention_with_kvcache(**call, backend=backend)
        with torch.inference_mode():
            flash_attention_with_kvcache(**clones(call), backend=backend)


def test_autograd_sees_that_the_caches_change(place):
    backend, device = place
    call = dense(device, lengths=(20, 3), room=32, new=1)
    factor = torch.ones((), device=device, requires_grad=True)
    product = (call["k_cache"] * factor).nan_to_num().sum()
    flash_attention_with_kvcache(**call, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_autocast_does_not_touch_it(place):
    backend, device = place
    call = dense(device)
    expected = flash_attention_with_kvcache(**call, backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(flash_attention_with_kvcache(**call, backend=backend), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("pages", [False, True], ids=["dense", "paged"])
def test_a_captured_step_replays_with_other_lengths(device, pages):
    """In the same tensors: lengths, tables, new keys."""

    def made(lengths, seed):
        call = dense(device, lengths=lengths, room=2000, new=1, queries=1, seed=seed)
        return paged(call, new=1, page_size=64, spare=200 - sum(-(-(n + 1) // 64) for n in lengths)) if pages else call

    static = made((5, 5, 5), 0)
    flash_attention_with_kvcache(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A wait for the device would end the capture.
    with torch.cuda.graph(graph):
        o = flash_attention_with_kvcache(**static)
    for lengths in ((1999, 0, 700), (3, 1500, 64), (64, 63, 65)):
        call = made(lengths, sum(lengths))
        for name, x in call.items():
            static[name].copy_(x)
        expected = flash_attention_with_kvcache(**call)
        graph.replay()
        assert torch.equal(o, expected)
        assert torch.equal(static["k_cache"].nan_to_num(9.0), call["k_cache"].nan_to_num(9.0))
