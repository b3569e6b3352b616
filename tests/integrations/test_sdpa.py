"""torch's own attention functions by tilewise's kernels: through its dispatcher on the CPU, and on a GPU."""

import importlib

import pytest
import torch
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from tilewise.integrations import sdpa
from tilewise.verify.compare import GRADIENT_FACTOR, OUTPUT_FACTOR, rounding_floor

registry = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"), reason="torch 2.13 has a registry of flash attention"
)


@pytest.fixture
def installed():
    """On the CPU, where torch has no such operators of its own."""
    handle = sdpa.Installed("CPU")
    yield
    handle.remove()


def math(q, k, v, **options):
    """In fp64, with gradients of the sum of squares."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o = scaled_dot_product_attention(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def dense(q, k, v, **options):
    options.pop("enable_gqa", None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*leaves, **options)
    assert lse.shape == q.shape[:-1]
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def check(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True, "scale": 0.3}], ids=["full", "causal"])
def test_dense(installed, layout, options):
    q, k, v = torch.randn(3, 2, 4, 37, 24)
    if layout == "tokens first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    found = dense(q, k, v, **options)
    check(found, math(q, k, v, **options))
    # What torch's compiler relies on.
    assert found[0].stride() == torch.empty_like(q).stride()


def test_grouped_heads_and_other_lengths(installed):
    q, k, v = torch.randn(1, 6, 9, 16), torch.randn(1, 2, 31, 16), torch.randn(1, 2, 31, 16)
    check(dense(q, k, v), math(q, k, v, enable_gqa=True))


def packed():
    q, k, v = torch.randn(3, 50, 4, 16)
    return q, k, v, torch.tensor([0, 13, 13, 50], dtype=torch.int32)


@registry
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (5, 3)], ids=str)
def test_packed(installed, window):
    q, k, v, cu = packed()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    varlen = importlib.import_module("torch.nn.attention.varlen")
    o, lse = varlen.varlen_attn(*leaves, cu, cu, 37, 37, window_size=window, return_aux=varlen.AuxRequest(lse=True))
    assert lse.shape == (4, 50)
    found = [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]
    parts = []
    for a, b in ((0, 13), (13, 50)):
        i, j = torch.arange(b - a)[:, None], torch.arange(b - a)
        left, right = (limit if limit >= 0 else 99 for limit in window)
        some = [x.detach()[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(math(*some, attn_mask=(j >= i - left) & (j <= i + right)))
    check(found, [torch.cat([x[0].transpose(0, 1) for x in each]) for each in zip(*parts, strict=True)])


@registry
def test_keys_that_are_used_packed_and_in_pages(installed):
    q, k, v, cu = packed()
    cu_q, used = torch.tensor([0, 2, 2, 5], dtype=torch.int32), torch.tensor([9, 0, 30], dtype=torch.int32)
    expected = torch.cat(
        [
            scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])))[0].transpose(
                0, 1
            )
            for a, b, c, d in ((0, 2, 0, 9), (2, 5, 13, 43))
        ]
    )
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    o = varlen_attn(q[:5], k, v, cu_q, cu, 3, 37, seqused_k=used)
    torch.testing.assert_close(o, expected)
    pools = torch.zeros(2, 4, 16, 4, 16)
    table = torch.tensor([[3, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    for pool, x in zip(pools, (k, v), strict=True):
        pool[3, :9], pool[0], pool[2, :14] = x[:9], x[13:29], x[29:43]
    o = varlen_attn(q[:5], *pools, cu_q, None, 3, 32, seqused_k=used, block_table=table)
    torch.testing.assert_close(o, expected)


@registry
def test_into_a_given_tensor(installed):
    q, k, v, cu = packed()
    out = torch.empty_like(q)
    varlen = importlib.import_module("torch.nn.attention.varlen")
    varlen.varlen_attn_out(out, q, k, v, cu, cu, 37, 37)
    assert torch.equal(out, varlen.varlen_attn(q, k, v, cu, cu, 37, 37))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1: tilewise's attention has no dropout"),
        ({"return_debug_mask": True}, "return_debug_mask is True"),
    ],
)
def test_what_it_cannot_do_raises(installed, options, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.aten._scaled_dot_product_flash_attention(*torch.randn(3, 1, 2, 5, 16), **options)


def overridden(key="CUDA"):
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_backward", key)


@registry
def test_it_is_active_between_activate_and_restore(monkeypatch):
    """On a machine without CUDA no other kernel has that key."""
    own = overridden()
    assert attention.current_flash_attention_impl() is None
    with sdpa.active():
        assert overridden()
        assert attention.current_flash_attention_impl() == "tilewise"
        with sdpa.active():
            pass
        assert attention.current_flash_attention_impl() == "tilewise"
    assert attention.current_flash_attention_impl() is None
    assert overridden() == own
    sdpa.activate()
    assert overridden()
    sdpa.restore()
    sdpa.restore()
    assert overridden() == own


@registry
def test_another_one_is_active_again_afterwards():
    class Other:
        def remove(self):
            pass

    attention.register_flash_attention_impl("other", register_fn=Other)
    attention.activate_flash_attention_impl("other")
    try:
        with sdpa.active():
            assert attention.current_flash_attention_impl() == "tilewise"
        assert attention.current_flash_attention_impl() == "other"
        # Not ours to restore.
        sdpa.restore()
        assert attention.current_flash_attention_impl() == "other"
    finally:
        attention.restore_flash_attention_impl()


def test_an_older_torch_is_told(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.13 or later"):
        sdpa.activate()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_torch_chooses_it(causal, device, monkeypatch):
    """By hand what the registry does, so that older torches show it too."""
    if device.type != "cuda":
        pytest.skip("torch chooses flash attention for CUDA tensors")
    calls = []

    def counted(*given, **options):
        calls.append(given)
        return own(*given, **options)

    own = sdpa._OPERATORS["_scaled_dot_product_flash_attention"]
    monkeypatch.setitem(sdpa._OPERATORS, "_scaled_dot_product_flash_attention", counted)
    given = torch.randn(3, 2, 8, 301, 64, device=device, dtype=torch.bfloat16)

    def run(backend):
        leaves = [x.detach().requires_grad_() for x in given]
        with attention.sdpa_kernel(backend):
            o = scaled_dot_product_attention(*leaves, is_causal=causal)
            return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]

    handle = sdpa.Installed()
    try:
        found = run(attention.SDPBackend.FLASH_ATTENTION)
    finally:
        handle.remove()
    assert len(calls) == 1
    eager, truth = run(attention.SDPBackend.MATH), math(*given, is_causal=causal)
    for x, y, exact, factor in zip(found, eager, truth, (OUTPUT_FACTOR, *(GRADIENT_FACTOR,) * 3), strict=True):
        error, of_eager = (abs(i.double() - exact).max() for i in (x, y))
        assert error <= factor * of_eager + rounding_floor(x.dtype, x.device) * abs(exact).max()
