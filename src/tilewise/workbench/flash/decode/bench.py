"""Attention over a cache, timed against dense attention as torch offers it: over the caches as they are, or over what
is gathered from their pages.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tilewise.bench.contender import Baseline, Call, CannotRunError
from tilewise.bench.dense import Dense, baselines, in_window
from tilewise.verify.suite import Case, Problem, Tensors
from tilewise.workbench.flash.decode.problem import Decode
from tilewise.workbench.operator import Benchmark


def describe(problem: Problem) -> Dense:
    """The problem's mask and scores; the causal mask leaves a single query all keys."""
    assert isinstance(problem, Decode)
    left, right = problem.window or (-1, -1)
    right = 0 if problem.causal and problem.T > 1 else -1 if problem.causal else right
    return Dense(left, right, problem.softcap, problem.scale, sinks=bool(problem.sinks))


def pairs(problem: Problem, _tensors: Tensors, _outputs: Tensors) -> int:
    """The pairs that the mask keeps."""
    assert isinstance(problem, Decode)
    left, right = problem.window or (-1, -1)
    queries = problem.queries or (problem.T,) * len(problem.lengths)
    padding = problem.leftpad or (0,) * len(problem.lengths)
    entries = zip(queries, problem.tokens(), padding, strict=True)
    # Aligned at the end: what is padded is as if it were not there.
    kept = (in_window(n, keys - behind, left, 0 if problem.causal else right) for n, keys, behind in entries)
    return problem.H * sum(kept)


def _one_length(problem: Problem) -> int:
    """Of all entries, which bring nothing new and have no padding."""
    assert isinstance(problem, Decode)
    if problem.new or problem.leftpad or problem.queries or len(set(problem.lengths)) > 1:
        raise CannotRunError("written for entries of one length, without new keys, padding or packed queries")
    return problem.lengths[0]


def _over_the_cache(build: Callable[[Problem, Tensors], Call], problem: Problem, tensors: Tensors) -> Call:
    """A kind of dense attention over the slots in use."""
    keys = _one_length(problem)
    if "page_table" in tensors:
        raise CannotRunError("takes no pages")
    return build(problem, {"q": tensors["q"], "k": tensors["k_cache"][:, :keys], "v": tensors["v_cache"][:, :keys]})


def gathered(problem: Problem, tensors: Tensors) -> Call:
    """Pages copied into dense tensors in every step, then torch's own choice of kernel."""
    keys, dense = _one_length(problem), describe(problem)
    if "page_table" not in tensors:
        raise CannotRunError("there are no pages to gather")
    if dense.softcap or dense.sinks or dense.left >= 0 or dense.right >= 0:
        raise CannotRunError("scaled_dot_product_attention has no such mask, softcap or sinks")
    q, table = tensors["q"].transpose(1, 2), tensors["page_table"][:, : -(-keys // tensors["k_cache"].shape[1])].long()

    def run() -> tuple[torch.Tensor]:
        k, v = (tensors[name][table].flatten(1, 2)[:, :keys].transpose(1, 2) for name in ("k_cache", "v_cache"))
        return (scaled_dot_product_attention(q, k, v, scale=dense.scale, enable_gqa=q.shape[1] != k.shape[1]),)

    return Call(run, [], lambda o: o.transpose(1, 2))


def _case(batch: int, keys: int, queries: int = 1, **sizes: Any) -> Case:
    """A step of some entries of one length."""
    heads, kv_heads, channels, page = (sizes[name] for name in ("H", "Hk", "D", "page"))
    words = f"{batch} × {keys} keys, T {queries}, {heads} / {kv_heads} heads, D {channels}"
    name = f"{batch}x{keys}-{channels}" + (f"-t{queries}" if queries > 1 else "") + (f"-mqa{heads}" * (kv_heads == 1))
    name, words = (f"{name}-pages{page}", f"{words}, pages of {page}") if page else (name, words)
    return Case(name, words, Decode((keys,) * batch, T=queries, **sizes))


def _cases() -> Iterator[Case]:
    grouped: dict[str, Any] = {"H": 32, "Hk": 8, "D": 128, "page": 0}
    for batch, keys in ((16, 4096), (64, 4096), (1, 32768), (16, 32768), (1, 131072)):
        yield _case(batch, keys, **grouped)
    for batch, keys in ((16, 4096), (1, 131072)):
        yield _case(batch, keys, **grouped | {"D": 64})
        yield _case(batch, keys, 4, **grouped)
        for page in (16, 64, 256):
            yield _case(batch, keys, **grouped | {"page": page})
    for heads in (64, 128):
        yield _case(8, 32768, **grouped | {"H": heads, "Hk": 1})


CPU: dict[str, Any] = {"H": 8, "Hk": 2, "D": 64, "page": 0}
BENCHMARK = Benchmark(
    tuple(_cases()),
    (_case(4, 1024, **CPU), _case(1, 8192, **CPU), _case(4, 1024, **CPU | {"page": 16})),
    pairs,
    (
        *(one._replace(build=partial(_over_the_cache, one.build)) for one in baselines(describe, dense=False)),
        Baseline("gathered", "pages gathered in every step, then scaled_dot_product_attention", gathered),
    ),
)
