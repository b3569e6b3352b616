"""FlashAttention-4 as benchmarks call it, without a GPU: a package on sys.path that writes down how it is called."""

import sys

import pytest

CUTE = """
from tilewise.ops.flash.reference import flash_attention

calls = []


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), softcap=0.0,
                    deterministic=False, **packed):
    calls.append({"shape": tuple(q.shape), "causal": causal, "window_size": window_size,
                  "deterministic": deterministic, **packed})
    limits = tuple(-1 if limit is None else limit for limit in window_size)
    starts = {name: packed[name] for name in packed if name.startswith("cu_")}
    return flash_attention(q, k, v, causal=causal, window_size=limits, scale=softmax_scale, softcap=softcap, **starts)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    return flash_attn_func(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                           max_seqlen_k=max_seqlen_k, **options)
"""


def _imported():
    return [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]


@pytest.fixture
def fake_flash_attn(monkeypatch, tmp_path_factory):
    """Where the package lies; it is not imported yet, and gone afterwards."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").touch()
    (folder / "flash_attn" / "cute.py").write_text(CUTE)
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in _imported():
        del sys.modules[name]


@pytest.fixture
def no_flash_attn(monkeypatch):
    """It cannot be imported, on a machine that has it too."""
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
