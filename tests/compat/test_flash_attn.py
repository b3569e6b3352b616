"""flash-attn's public calls, made of tilewise.compat: outputs, LSE and gradients against the reference in fp64."""

import inspect

import pytest
import torch

from tilewise import compat
from tilewise.ops.flash import reference
from tilewise.ops.flash.decode.reference import flash_attention_with_kvcache as cached

OPTIONS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None"
    " deterministic=False return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
# As flash-attn 2.8 declares them.
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {OPTIONS} block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {OPTIONS}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None"
        " cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0"
        " rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}
# Five sequences of queries and of keys, one of each empty.
STARTS_Q = torch.tensor([0, 13, 13, 30, 37, 38], dtype=torch.int32)
STARTS_K = torch.tensor([0, 13, 20, 49, 54, 54], dtype=torch.int32)
CAUSAL = {"causal": True}
WINDOW = {"window_size": (5, 2), "softmax_scale": 0.3}
CAPPED = {"causal": True, "window_size": (9, 0), "softcap": 2.0}


def made(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found, expected, what=""):
    """fp32 against fp64."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=lambda said: f"{what}: {said}")


def named(options):
    """For the reference."""
    return {"scale" if name == "softmax_scale" else name: x for name, x in options.items()}


def judge(function, expected, *tensors):
    """Output, LSE and gradients of `function` in fp32 as of `expected` in fp64."""
    ours = [x.clone().requires_grad_() for x in tensors]
    theirs = [x.double().requires_grad_() for x in tensors]
    out, lse, probabilities = function(*ours)
    true_out, true_lse = expected(*theirs)
    assert probabilities is None
    assert lse.dtype == torch.float32
    assert lse.shape == true_lse.shape
    close(out, true_out, "out")
    close(lse, true_lse, "lse")
    incoming = made(*out.shape, seed=9)
    found = torch.autograd.grad(out, ours, incoming)
    for i, (x, y) in enumerate(zip(found, torch.autograd.grad(true_out, theirs, incoming.double()), strict=True)):
        close(x, y, f"gradient {i}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_where_flash_attn_has_them(name):
    signature = inspect.signature(getattr(compat, name))
    parameters = {key: p for key, p in signature.parameters.items() if p.kind != p.KEYWORD_ONLY}
    words = [key if p.default is p.empty else f"{key}={p.default!r}" for key, p in parameters.items()]
    assert " ".join(words) == SIGNATURES[name]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(signature.parameters) - set(parameters) <= {"s_aux"}


def test_every_function_has_its_signature_here():
    assert sorted(SIGNATURES) == compat.__all__


@pytest.mark.parametrize("packed", [False, True])
def test_sinks(packed):
    def attend(*tensors):
        *tensors, sinks = tensors
        call, lengths = compat.flash_attn_func, ()
        if packed:
            call, lengths = compat.flash_attn_varlen_func, (STARTS_Q, STARTS_K, 17, 29)
        return call(*tensors, *lengths, return_attn_probs=True, s_aux=sinks)

    def expected(q, k, v, sinks):
        where = {"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K} if packed else {}
        return reference.flash_attention(q, k, v, sinks=sinks, **where)

    queries, keys = ((38,), (54,)) if packed else ((2, 19), (2, 33))
    judge(attend, expected, made(*queries, 6, 20), *made(2, *keys, 2, 20, seed=1), made(6, seed=2))


@pytest.mark.parametrize("options", [{}, CAUSAL, WINDOW, CAPPED], ids=["plain", "causal", "window", "softcap"])
@pytest.mark.parametrize("packing", ["separate", "kv", "qkv"])
def test_dense(packing, options):
    def attend(*tensors):
        call = {
            "separate": compat.flash_attn_func,
            "kv": compat.flash_attn_kvpacked_func,
            "qkv": compat.flash_attn_qkvpacked_func,
        }[packing]
        return call(*tensors, 0.0, **options, return_attn_probs=True)

    def expected(*tensors):
        q, k, v = [*tensors[:-1], *tensors[-1].unbind(-3)] if packing != "separate" else tensors
        return reference.flash_attention(q, k, v, **named(options))

    tensors = {
        "separate": (made(2, 19, 6, 20), made(2, 33, 2, 20, seed=1), made(2, 33, 2, 20, seed=2)),
        "kv": (made(2, 19, 6, 20), made(2, 33, 2, 2, 20, seed=1)),
        "qkv": (made(2, 19, 3, 4, 20),),
    }[packing]
    judge(attend, expected, *tensors)


@pytest.mark.parametrize("options", [{}, CAUSAL, WINDOW, CAPPED], ids=["plain", "causal", "window", "softcap"])
@pytest.mark.parametrize("packing", ["separate", "kv", "qkv"])
def test_varlen(packing, options):
    """As flash-attn's own attention modules call it: offsets and longest lengths by position."""

    def attend(*tensors):
        if packing == "qkv":
            call, lengths = compat.flash_attn_varlen_qkvpacked_func, (STARTS_Q, 17)
        else:
            call = compat.flash_attn_varlen_func if packing == "separate" else compat.flash_attn_varlen_kvpacked_func
            lengths = (STARTS_Q, STARTS_K, 17, 29)
        return call(*tensors, *lengths, 0.0, **options, return_attn_probs=True)

    def expected(*tensors):
        q, k, v = [*tensors[:-1], *tensors[-1].unbind(-3)] if packing != "separate" else tensors
        starts_k = STARTS_Q if packing == "qkv" else STARTS_K
        return reference.flash_attention(q, k, v, **named(options), cu_seqlens_q=STARTS_Q, cu_seqlens_k=starts_k)

    tensors = {
        "separate": (made(38, 6, 20), made(54, 2, 20, seed=1), made(54, 2, 20, seed=2)),
        "kv": (made(38, 6, 20), made(54, 2, 2, 20, seed=1)),
        "qkv": (made(38, 3, 4, 20),),
    }[packing]
    judge(attend, expected, *tensors)


def test_positions_are_flash_attns():
    """Every option by position."""
    q, k, v = (made(1, 9, 2, 16, seed=i) for i in range(3))
    out, _, _ = compat.flash_attn_func(q, k, v, 0.0, 0.5, True, (4, 0), 3.0, None, True, True)
    truth = reference.flash_attention(
        *(x.double() for x in (q, k, v)), scale=0.5, causal=True, window_size=(4, 0), softcap=3.0
    )
    close(out, truth[0])


@pytest.mark.parametrize(
    ("queries", "keys", "rows"),
    [(2, 5, ["11110", "11111"]), (5, 2, ["00", "00", "00", "10", "11"])],
)
def test_causal_masks_are_those_its_readme_shows(queries, keys, rows):
    q, k = made(1, queries, 1, 8), made(1, keys, 1, 8, seed=1)
    out, lse, _ = compat.flash_attn_func(q, k, torch.eye(keys)[None, :, None], causal=True, return_attn_probs=True)
    assert ["".join(str(int(p > 0)) for p in row) for row in out[0, :, 0]] == rows
    # Where flash-attn gives +inf.
    assert [value == -torch.inf for value in lse[0, 0]] == ["1" not in row for row in rows]


def test_bf16_errs_at_most_twice_as_far_as_eager():
    """Its README's own criterion."""
    q, k, v = (made(2, 65, heads, 64, seed=heads, dtype=torch.bfloat16) for heads in (4, 2, 2))
    out = compat.flash_attn_func(q, k, v, causal=True)
    truth, _ = reference.flash_attention(*(x.double() for x in (q, k, v)), causal=True)
    eager, _ = reference.flash_attention(q, k, v, causal=True, compute_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert (out - truth).abs().max() <= 2 * (eager - truth).abs().max()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_do(queries, keys):
    out, lse, _ = compat.flash_attn_func(
        *(made(1, length, 2, 8) for length in (queries, keys, keys)), return_attn_probs=True
    )
    assert torch.equal(out, torch.zeros(1, queries, 2, 8))
    assert torch.equal(lse, torch.full((1, 2, queries), -torch.inf))


def test_what_changes_no_value_arrives_too(monkeypatch):
    """The choice of a backward, of splits, and lengths that are only checked."""
    q = made(1, 5, 1, 8)
    given = []

    def record(*tensors, **options):
        given.append(options["deterministic"])
        return reference.flash_attention(*tensors)

    with monkeypatch.context() as patch:
        patch.setattr(compat, "flash_attention", record)
        compat.flash_attn_func(q, q, q)
        compat.flash_attn_func(q, q, q, deterministic=True)
    assert given == [False, True]
    with pytest.raises(ValueError, match="num_splits"):
        compat.flash_attn_with_kvcache(q, q, q, num_splits=-1)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    for lengths, name in (((4, 5), "max_seqlen_q"), ((5, 4), "max_seqlen_k")):
        with pytest.raises(ValueError, match=name):
            compat.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, *lengths)


def test_a_softcap_below_zero_means_none():
    q, k, v = (made(1, 5, 1, 8, seed=i) for i in range(3))
    assert torch.equal(compat.flash_attn_func(q, k, v, softcap=-1.0), compat.flash_attn_func(q, k, v))
    with torch.no_grad():
        capped, plain = (compat.flash_attn_with_kvcache(q, k, v, softcap=cap) for cap in (-1.0, 0.0))
    assert torch.equal(capped, plain)


def in_pages(x, lengths, page_size, seed=3):
    """Rows of each entry in pages of an order of their own: a pool and its table."""
    width = -(-x.shape[1] // page_size)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(seed))
    table = order.view(len(lengths), width).to(torch.int32)
    pool = torch.full((len(order), page_size, *x.shape[2:]), torch.nan)
    for b, length in enumerate(lengths):
        for j in range(length):
            pool[table[b, j // page_size], j % page_size] = x[b, j]
    return pool, table


def test_varlen_over_pages():
    """A paged prefill: queries packed, keys in a pool, their numbers by cu_seqlens_k."""
    q, lengths = made(38, 4, 16), STARTS_K.diff().tolist()
    k, v = (made(5, 29, 2, 16, seed=i) for i in (1, 2))
    (k_pool, table), (v_pool, _) = (in_pages(x, lengths, 16) for x in (k, v))
    out, lse, none = compat.flash_attn_varlen_func(
        *(q, k_pool, v_pool, STARTS_Q, STARTS_K, 17, 29, 0.0, None, True, (-1, -1), 0.0, None, False, True, table)
    )
    packed = (torch.cat([x[b, :length] for b, length in enumerate(lengths)]).double() for x in (k, v))
    truth = reference.flash_attention(q.double(), *packed, causal=True, cu_seqlens_q=STARTS_Q, cu_seqlens_k=STARTS_K)
    assert none is None
    close(out, truth[0])
    close(lse, truth[1])


LENGTHS_USED = [7, 0, 20]
LENGTHS_OF_CACHE = {"int": 7, "tensor": torch.tensor(LENGTHS_USED, dtype=torch.int32)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", LENGTHS_OF_CACHE)
def test_a_step_writes_and_attends(given, causal):
    """Keys and values as its attention module keeps them: two views of one cache."""
    q, kv = made(3, 2, 4, 16), made(3, 3, 2, 2, 16, seed=1)
    kv_cache = made(3, 25, 2, 2, 16, seed=2)
    expected = [x.clone().double() for x in kv_cache.unbind(2)]
    out, lse = compat.flash_attn_with_kvcache(
        q,
        kv_cache[:, :, 0],
        kv_cache[:, :, 1],
        kv[:, :, 0],
        kv[:, :, 1],
        rotary_cos=None,
        rotary_sin=None,
        cache_seqlens=LENGTHS_OF_CACHE[given],
        softmax_scale=None,
        causal=causal,
        rotary_interleaved=False,
        alibi_slopes=None,
        return_softmax_lse=True,
    )
    new = (x.double() for x in kv.unbind(2))
    truth = cached(q.double(), *expected, *new, cache_seqlens=LENGTHS_OF_CACHE[given], causal=causal)
    close(out, truth[0])
    close(lse, truth[1])
    for found, cache in zip(kv_cache.unbind(2), expected, strict=True):
        assert torch.equal(found.double(), cache)


def test_a_cache_without_lengths_is_full():
    q, k, v = made(2, 1, 4, 16), made(2, 32, 2, 16, seed=1), made(2, 32, 2, 16, seed=2)
    truth, _ = cached(*(x.double() for x in (q, k, v)), cache_seqlens=32, causal=False)
    (k_pool, table), (v_pool, _) = (in_pages(x, [32, 32], 16) for x in (k, v))
    close(compat.flash_attn_with_kvcache(q, k, v), truth)
    close(compat.flash_attn_with_kvcache(q, k_pool, v_pool, block_table=table), truth)
    with pytest.raises(ValueError, match="k is given without cache_seqlens"):
        compat.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1])


def test_a_step_over_pages_and_a_padded_cache():
    q, lengths = made(3, 2, 4, 16), LENGTHS_OF_CACHE["tensor"]
    k, v = (made(3, 25, 2, 16, seed=i) for i in (1, 2))
    options = {"causal": True, "window_size": (11, 0), "softcap": 2.0, "softmax_scale": 0.5, "num_splits": 2}
    caches = [x.double() for x in (k, v)]
    (k_pool, table), (v_pool, _) = (in_pages(x, LENGTHS_USED, 16) for x in (k, v))
    truth, _ = cached(q.double(), *caches, cache_seqlens=lengths, **named(options))
    paged = compat.flash_attn_with_kvcache(q, k_pool, v_pool, cache_seqlens=lengths, block_table=table, **options)
    close(paged, truth)
    leftpad = torch.tensor([6, 0, 5], dtype=torch.int32)
    truth, _ = cached(q.double(), *caches, cache_seqlens=lengths, leftpad_k=leftpad, **named(options))
    padded = compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, **options)
    close(padded, truth)


def test_what_is_said_to_stand_in_for_cache_batch_idx_does():
    """Entries of a cache as pages of all of their rows."""
    q, k, v = made(2, 1, 4, 16), made(2, 1, 2, 16, seed=1), made(2, 1, 2, 16, seed=2)
    k_cache, v_cache = (made(5, 32, 2, 16, seed=i) for i in (3, 4))
    chosen, lengths = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([9, 30], dtype=torch.int32)
    picked = [x[chosen].double() for x in (k_cache, v_cache)]
    with pytest.raises(ValueError, match=r"block_table=cache_batch_idx\[:, None\]"):
        compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=chosen)
    out = compat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=chosen[:, None])
    truth, _ = cached(q.double(), *picked, k.double(), v.double(), cache_seqlens=lengths, causal=False)
    close(out, truth)
    assert torch.equal(k_cache[chosen].double(), picked[0])


@pytest.mark.slow
def test_they_compile_whole():
    q, k, v = (made(1, 16, 2, 16, seed=i) for i in range(3))
    q.requires_grad_()

    def train(q, k, v):
        return compat.flash_attn_func(q, k, v, causal=True, softcap=2.0, return_attn_probs=True)[0]

    def step(q, k, v, lengths):
        return compat.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)

    out = torch.compile(train, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(out, train(q, k, v))
    found, expected = (torch.autograd.grad(o.sum(), q)[0] for o in (out, train(q, k, v)))
    assert torch.equal(found, expected)
    with torch.no_grad():
        given = (q[:, :1], k, v, torch.tensor([9], dtype=torch.int32))
        assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*given), step(*given))


OF_CACHE = {
    "rotary_cos": "rotate q and k before the call",
    "rotary_sin": "rotate q and k before the call",
    "cache_batch_idx": "block_table",
    "alibi_slopes": "flex_attention",
}


@pytest.mark.parametrize("name", OF_CACHE)
def test_a_cache_refuses_by_name(name):
    q = made(1, 1, 2, 8)
    with pytest.raises(ValueError, match=f"^{name} is given: .*{OF_CACHE[name]}"):
        compat.flash_attn_with_kvcache(q, q, q, cache_seqlens=1, **{name: torch.zeros(1)})


# What comes before the options, by name.
TENSORS = {
    "flash_attn_func": (made(1, 4, 2, 8),) * 3,
    "flash_attn_qkvpacked_func": (made(1, 4, 3, 2, 8),),
    "flash_attn_kvpacked_func": (made(1, 4, 2, 8), made(1, 4, 2, 2, 8)),
    "flash_attn_varlen_func": (*(made(4, 2, 8),) * 3, *(torch.tensor([0, 4]),) * 2, 4, 4),
    "flash_attn_varlen_qkvpacked_func": (made(4, 3, 2, 8), torch.tensor([0, 4]), 4),
    "flash_attn_varlen_kvpacked_func": (made(4, 2, 8), made(4, 2, 2, 8), *(torch.tensor([0, 4]),) * 2, 4, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_dropout_and_alibi_are_refused_by_name(name):
    call, given = getattr(compat, name), TENSORS[name]
    assert call(*given, 0.0).shape[-2:] == (2, 8)
    with pytest.raises(ValueError, match=r"^dropout_p is 0\.1: .*scaled_dot_product_attention"):
        call(*given, 0.1)
    with pytest.raises(ValueError, match="^alibi_slopes is given: .*flex_attention"):
        call(*given, alibi_slopes=torch.ones(2))


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("flash_attn_qkvpacked_func", (1, 4, 2, 2, 8), r"\[B, T, 3, H, D\]"),
        ("flash_attn_varlen_qkvpacked_func", (1, 4, 3, 2, 8), r"\[N, 3, H, D\]"),
    ],
)
def test_a_packed_tensor_of_another_shape_is_refused(name, shape, axes):
    with pytest.raises(ValueError, match=rf"^qkv has shape .*: expected {axes}"):
        getattr(compat, name)(made(*shape), *TENSORS[name][1:])
