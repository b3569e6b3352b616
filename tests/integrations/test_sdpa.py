"""torch's own attention functions by tilewise's kernels: through its dispatcher on the CPU, and on a GPU."""

import importlib

import pytest
import torch
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention

from tilewise.integrations import sdpa
from tilewise.verify.compare import GRADIENT_FACTOR, OUTPUT_FACTOR, rounding_floor

varlen = importlib.import_module("torch.nn.attention.varlen")
registry = pytest.mark.skipif(
    not hasattr(attention, "restore_flash_attention_impl"), reason="torch 2.11 has a registry of flash attention"
)
newer_varlen = pytest.mark.skipif(
    not hasattr(varlen, "varlen_attn_out"), reason="torch 2.13 has varlen_attn with seqused_k, pages and a given output"
)


@pytest.fixture
def installed():
    """On the CPU, where torch has no such operators of its own."""
    handle = sdpa.Installed("CPU")
    yield
    handle.remove()


def differentiated(function, tensors):
    """Output and gradients of the sum of squares."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o = function(*leaves)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def math(q, k, v, **options):
    """In fp64."""
    return differentiated(lambda *x: scaled_dot_product_attention(*x, **options), [x.double() for x in (q, k, v)])


def dense(q, k, v, **options):
    options.pop("enable_gqa", None)

    def attend(*x):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*x, **options)
        assert lse.shape == q.shape[:-1]
        return o

    return differentiated(attend, (q, k, v))


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


@newer_varlen
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
    o = varlen.varlen_attn(q[:5], k, v, cu_q, cu, 3, 37, seqused_k=used)
    torch.testing.assert_close(o, expected)
    pools = torch.zeros(2, 4, 16, 4, 16)
    table = torch.tensor([[3, -1], [-1, -1], [0, 2]], dtype=torch.int32)
    for pool, x in zip(pools, (k, v), strict=True):
        pool[3, :9], pool[0], pool[2, :14] = x[:9], x[13:29], x[29:43]
    o = varlen.varlen_attn(q[:5], *pools, cu_q, None, 3, 32, seqused_k=used, block_table=table)
    torch.testing.assert_close(o, expected)


@newer_varlen
def test_into_a_given_tensor(installed):
    q, k, v, cu = packed()
    out = torch.empty_like(q)
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
    monkeypatch.delattr(attention, "restore_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.11 or later"):
        sdpa.activate()


@pytest.fixture(params=["by hand", pytest.param("activated", marks=registry)])
def on_gpu(request, device, monkeypatch):
    """The calls of tilewise's operators, which are in force: by hand as the registry has them, so that a torch without
    it shows them too.
    """
    if device.type != "cuda":
        pytest.skip("torch chooses flash attention for CUDA tensors")
    calls = []

    def counted(name, function):
        def call(*given, **options):
            calls.append(name)
            return function(*given, **options)

        return call

    for name, function in sdpa._OPERATORS.items():
        monkeypatch.setitem(sdpa._OPERATORS, name, counted(name, function))
    if request.param == "activated":
        with sdpa.active():
            yield calls
    else:
        handle = sdpa.Installed()
        yield calls
        handle.remove()


def judge(found, eager, truth):
    """verify's criterion, of output and gradients."""
    for x, y, exact, factor in zip(found, eager, truth, (OUTPUT_FACTOR, *(GRADIENT_FACTOR,) * 3), strict=True):
        error, of_eager = (abs(i.double() - exact).max() for i in (x, y))
        assert error <= factor * of_eager + rounding_floor(x.dtype, x.device) * abs(exact).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "keys", "options"),
    [(8, 301, {}), (8, 301, {"is_causal": True, "scale": 0.3}), (2, 517, {"enable_gqa": True})],
    ids=["full", "causal", "grouped"],
)
def test_on_a_gpu_torch_chooses_it(heads, keys, options, device, on_gpu):
    random = torch.Generator(device).manual_seed(0)
    shapes = (2, 8, 301, 64), *[(2, heads, keys, 64)] * 2
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16, generator=random) for shape in shapes]

    def by(backend):
        with attention.sdpa_kernel(backend):
            return differentiated(lambda *x: scaled_dot_product_attention(*x, **options), given)

    found = by(attention.SDPBackend.FLASH_ATTENTION)
    name = "_scaled_dot_product_flash_attention"
    assert on_gpu == [name, f"{name}_backward"]
    judge(found, by(attention.SDPBackend.MATH), math(*given, **options))
    assert len(on_gpu) == 2


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_compiled(device, on_gpu):
    random = torch.Generator(device).manual_seed(0)
    given = torch.randn(3, 2, 301, 8, 64, device=device, dtype=torch.bfloat16, generator=random).transpose(2, 3)

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        expected = differentiated(attend, given)
        found = differentiated(torch.compile(attend, fullgraph=True), given)
    assert len(on_gpu) == 4
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_packed_sequences_reach_it(device, on_gpu):
    """As varlen_attn calls it."""
    random = torch.Generator(device).manual_seed(0)
    given = torch.randn(3, 500, 4, 64, device=device, dtype=torch.bfloat16, generator=random)
    cu = torch.tensor([0, 130, 130, 500], dtype=torch.int32, device=device)

    def packed(*x):
        return torch.ops.aten._flash_attention_forward(*x, cu, cu, 370, 370, 0.0, True, False)[0]

    def by_sequence(*x):
        parts = ((y[a:b].transpose(0, 1)[None] for y in x) for a, b in ((0, 130), (130, 500)))
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return torch.cat([scaled_dot_product_attention(*y, is_causal=True)[0].transpose(0, 1) for y in parts])

    found = differentiated(packed, given)
    assert on_gpu == ["_flash_attention_forward", "_flash_attention_backward"]
    judge(found, differentiated(by_sequence, given), differentiated(by_sequence, given.double()))
