"""Inputs that a function writes in place: judged bit by bit, and nothing around them may change."""

import pytest
import torch

from tilewise.ops.flash.decode import reference
from tilewise.verify import verify
from tilewise.verify.result import OVERRUN, UPDATE
from tilewise.verify.suite import GUARD


def right(q, k_cache, v_cache, *, return_lse=False, num_splits=0, **options):
    o, lse = reference.flash_attention_with_kvcache(q, k_cache, v_cache, **options)
    return (o, lse) if return_lse else o


def judged(function, *configs, **settings):
    return verify("flash-decode", function, configs=configs, dtypes=["bf16"], **settings)


def test_what_is_right_passes():
    report = judged(right, "small", "pages", "strided", "no-queries")
    assert report.passed, report.failures
    assert {c.name for result in report.results for c in result.comparisons} == {"o", "lse"}
    uses = judged(right, "small", uses=["all"])
    assert uses.passed, uses.failures
    # There are no gradients to use in some way.
    assert not {"some-inputs", "second-backward"} & {result.check.use for result in uses.results}


def changes_an_old_key(q, k_cache, v_cache, **options):
    made = right(q, k_cache, v_cache, **options)
    k_cache[0, 3, 0, 0] *= 1.01
    return made


def writes_where_none_is_new(q, k_cache, v_cache, **options):
    """Where no key is: no result shows it."""
    made = right(q, k_cache, v_cache, **options)
    v_cache[0, -1] = 0
    return made


def writes_late(q, k_cache, v_cache, *, cache_seqlens, **options):
    """Attends to all that it should, and leaves the cache as it was."""
    return right(q, k_cache.clone(), v_cache.clone(), cache_seqlens=cache_seqlens, **options)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (changes_an_old_key, "k_cache: 0 of the 192 elements that change are wrong, and 1 that do not have changed"),
        (writes_where_none_is_new, "v_cache: 0 of the 384 elements that change are wrong, and 64 that do not"),
        (
            writes_late,
            "k_cache: 192 of the 192 elements that change are wrong, and 0 that do not have changed; the first",
        ),
    ],
)
def test_a_wrong_update_is_found(function, says):
    (result,) = judged(function, "small").results
    assert result.statuses == (UPDATE,)
    assert any(says in finding.message for finding in result.findings)
    assert all(comparison.passed for comparison in result.comparisons)


def test_memory_around_them_is_not_written():
    def writes_around(q, k_cache, v_cache, **options):
        made = right(q, k_cache, v_cache, **options)
        torch.as_strided(k_cache, (1,), (1,), GUARD - 1).zero_()
        return made

    (result,) = judged(writes_around, "small").results
    assert result.statuses == (OVERRUN,)
