"""Bugs planted between transformers and flash_attention: the checks of test_transformers.py catch every one."""

import pytest
import torch

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")

from tiny_models import SPARSE, failures, generated, over_a_cache  # noqa: E402

from tilewise.integrations.transformers import attend, blocks, masks, register  # noqa: E402

real = {
    "flash_attention": attend.flash_attention,
    "selected_attention": blocks.selected_attention,
    "_last_queries": blocks._last_queries,
    "_by_module": attend._by_module,
    "_placed": masks._placed,
    "_packed": masks._packed,
}
STATIC = {"cache_implementation": "static"}


def trains(name, kind):
    return lambda: not failures(name, kind)


def generates(name, **options):
    return lambda: generated(name, "tilewise", **options).tolist() == generated(name, "eager", **options).tolist()


def continues(name, static=False):
    def passes():
        return torch.allclose(*(over_a_cache(name, how, static) for how in ("tilewise", "eager")), rtol=1e-4, atol=1e-4)

    return passes


def call(**changed):
    """flash_attention with arguments that functions of their values change, where they are given."""

    def bug(q, k, v, **given):
        new = {name: change(given[name]) for name, change in changed.items() if given.get(name) is not None}
        return real["flash_attention"](q, k, v, **given | new)

    return {"flash_attention": bug}


def tensors(change):
    return {"flash_attention": lambda q, k, v, **given: real["flash_attention"](*change(q, k, v), **given)}


def placed(change):
    """Masks made from other numbers: `change` takes and returns the pattern, how many keys are in use, and padding."""
    return {"_placed": lambda found, *given: real["_placed"](found, *change(*given))}


def rows(change):
    """The sequences of a padded batch, changed."""

    def bug(*given):
        found, wrong = real["_placed"](*given)
        return (found if found.rows is None else found._replace(rows=change(found.rows))), wrong

    return {"_placed": bug}


def chosen(choose=lambda x: x, **changed):
    """selected_attention with another choice of blocks."""

    def bug(q, k, v, indices, **given):
        return real["selected_attention"](q, k, v, choose(indices), **given | changed)

    return {"selected_attention": bug}


def last_queries(at=lambda first: first, choose=lambda x: x):
    """The same of queries over a cache, or of a batch with padding, which may begin at other positions."""

    def bug(q, k, v, indices, cu, cu_k, first, *given):
        return real["_last_queries"](q, k, v, choose(indices), cu, cu_k, at(first), *given)

    return {"_last_queries": bug}


def wider(window):
    return window if window == (-1, -1) else (window[0] + 1, window[1])


def narrower(window):
    return window if window == (-1, -1) else (window[0] - 1, window[1])


def crossed(sequence):
    """The last of the sequences is one with that before it."""
    return real["_packed"](sequence.clamp(max=1))


def late(sequence):
    return real["_packed"](sequence.roll(1, -1).index_fill(-1, torch.tensor([0]), 0))


BUGS = {
    "a window of one key more": (call(window_size=wider), trains("mistral", "dense")),
    "a window of one key less, generating": (call(window_size=narrower), generates("gemma3")),
    "no window": (call(window_size=lambda _: (-1, -1)), trains("gemma2", "left")),
    "a window to one side": (call(window_size=lambda x: (x[0], min(x[1], 0))), trains("modernbert", "dense")),
    "no softcap": (call(softcap=lambda _: 0.0), trains("gemma2", "dense")),
    "half the softcap": (call(softcap=lambda x: x / 2), trains("gemma2", "dense")),
    "scaling ignored": (call(scale=lambda _: None), trains("gemma2", "dense")),
    "no sinks": (call(sinks=lambda _: None), trains("gpt-oss", "dense")),
    "sinks of the next head": (call(sinks=lambda x: x.roll(1)), trains("gpt-oss", "dense")),
    "sinks that do not learn": (call(sinks=torch.Tensor.detach), trains("gpt-oss", "dense")),
    "not causal": (call(causal=lambda _: False), trains("llama", "dense")),
    "causal where it is not": (call(causal=lambda _: True), trains("bert", "dense")),
    "KV heads in another order": (tensors(lambda q, k, v: (q, k.flip(-2), v.flip(-2))), trains("llama", "dense")),
    "values of the next head": (tensors(lambda q, k, v: (q, k, v.roll(1, -2))), trains("deepseek-v3", "dense")),
    "keys that do not learn": (tensors(lambda q, k, v: (q, k.detach(), v)), trains("qwen3", "dense")),
    "padding on the other side": (placed(lambda p, used, keep: (p, used, keep.flip(1))), trains("llama", "left")),
    "no padding, training": (placed(lambda p, used, keep: (p, used, keep | True)), trains("bert", "right")),
    "no padding, generating": (call(leftpad_k=torch.zeros_like), generates("llama")),
    "a token of padding is seen": (call(leftpad_k=lambda x: (x - 1).clamp(min=0)), generates("llama")),
    "a cache that ends too early": (call(seqused_k=lambda x: x - 1), generates("llama", **STATIC)),
    "a cache that never ends": (call(seqused_k=lambda _: None), generates("llama", **STATIC)),
    "packed sequences that see each other": ({"_packed": crossed}, trains("llama", "packed")),
    "packed sequences that begin one late": ({"_packed": late}, trains("gemma2", "packed")),
    "blocks of half the size": (chosen(block_size=2), trains(SPARSE, "dense")),
    "blocks of the other KV head": (chosen(choose=lambda x: x.roll(1, 2)), trains(SPARSE, "dense")),
    "the last block of a choice left out": (chosen(choose=lambda x: x[..., :-1]), trains(SPARSE, "dense")),
    "blocks over a cache one token early": (last_queries(at=lambda x: x - 1), continues(SPARSE)),
    "blocks over a static cache one token late": (last_queries(at=lambda x: x + 1), continues(SPARSE, static=True)),
    "blocks of the other KV head over a cache": (last_queries(choose=lambda x: x.roll(1, -2)), continues(SPARSE)),
    "blocks of the next token of a padded batch": (
        last_queries(choose=lambda x: x.roll(-1, 0)),
        trains(SPARSE, "right"),
    ),
    "an image whose parts see those before alone": (
        {"_by_module": lambda *given: real["_by_module"](*given)._replace(causal=True)},
        trains("qwen2.5-vl", "dense"),
    ),
    "rows put back one late": (rows(lambda x: x._replace(q=x.q.roll(1))), trains("llama", "left")),
    "keys of the other entry": (rows(lambda x: x._replace(k=x.k.flip(0))), trains("mistral", "right")),
}


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, monkeypatch):
    changed, passes = BUGS[name]
    for part, bug in changed.items():
        (module,) = (one for one in (attend, blocks, masks) if getattr(one, part, None) is real[part])
        monkeypatch.setattr(module, part, bug)
    assert not passes()
