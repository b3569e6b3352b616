"""Flash attention over two, three and four processes gives what one gives."""

import pytest
import torch
from parallel import flash_ranks
from parallel.flash_ranks import counted, sharded, whole
from processes import processes

DENSE, PACKED = [0, 139], [0, 70, 70, 73, 139]
SIZES = (2, 4, 2, 16, 24)
OPTIONS = {
    "": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (20, 0)},
    "two-sided": {"window_size": (9, 14)},
    "softcap": {"causal": True, "softcap": 4.0, "scale": -0.4},
}


def slow(*values, **options):
    return pytest.param(*values, **options, marks=pytest.mark.slow)


def compare(world, offsets, options, backend, dtype=torch.float32, with_sinks=False, **plan_options):
    given = SIZES, offsets, dtype, options, with_sinks, backend
    truth = whole(*given[:2], torch.float64, *given[3:-1], "reference")
    eager = whole(*given[:-1], "reference")
    for found in processes().run(sharded, world, *given, plan_options):
        for x, y, exact in zip(found, eager, truth, strict=True):
            assert x.shape == exact.shape
            seen = exact.isfinite()
            assert torch.equal(x.isfinite(), seen)
            error, allowed = (abs(i.double() - exact)[seen].max() for i in (x, y))
            assert error <= 2 * allowed + 1e-6, (error, allowed)


@pytest.mark.parametrize("offsets", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("options", [slow(x) if x in ("", "softcap", "two-sided") else x for x in OPTIONS])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_it_gives_what_one_process_gives(offsets, options, method):
    compare(2, offsets, OPTIONS[options], "cpu", method=method)


@pytest.mark.parametrize("backend", ["reference", slow("triton")])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_every_backend(backend, method):
    compare(2, PACKED, {"window_size": (30, 3)}, backend, with_sinks=True, method=method)


@pytest.mark.parametrize("world", [slow(1), slow(3), 4])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_more_processes(world, method):
    compare(world, PACKED, {"causal": True}, "cpu", torch.bfloat16, with_sinks=True, method=method)
    compare(world, [0, 3], {"causal": True}, "cpu", with_sinks=True, balance="contiguous", method=method)


def striped(tokens, world):
    return torch.arange(tokens) // 5 % world


@pytest.mark.parametrize("offsets", [pytest.param(DENSE, id="dense"), slow(PACKED, id="packed")])
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_any_assignment(offsets, method):
    compare(3, offsets, {"causal": True}, "cpu", method=method, balance=striped(offsets[-1], 3))
    # All of it on one rank, and the others empty.
    compare(3, offsets, {"window_size": (8, 8)}, "cpu", method=method, balance=torch.full((offsets[-1],), 1))


def test_the_reference_where_a_rank_has_no_tokens():
    processes().run(flash_ranks.on_reference, 3)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_a_second_derivative_is_refused(method):
    for _, error, _ in processes().results(flash_ranks.twice_where_there_is_no_such_derivative, 2, method):
        assert "NotImplementedError" in error
        assert "backend='reference'" in error


def test_a_plan_made_in_inference_mode_trains():
    processes().run(flash_ranks.inferring_then_training, 2)


@pytest.mark.slow
def test_many_calls_sum_up_the_gradient_of_sinks():
    for error, allowed in processes().run(flash_ranks.sinks_in_16_bits, 2):
        assert error <= 2 * allowed


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_inside_torch_compile_a_plan_is_run_as_it_stands(method):
    for eager, first, second, graphs in processes().run(flash_ranks.compiled, 2, method):
        assert all(map(torch.equal, eager, first))
        assert all(map(torch.equal, eager, second))
        # Before attention, behind it, and behind unshard: none of the plan's own, and none anew for another plan.
        assert graphs == 3


def test_a_few_heads_at_a_time():
    compare(2, PACKED, {"causal": True}, "cpu", with_sinks=True, balance="contiguous", heads_at_a_time=1)


@pytest.mark.parametrize(
    ("options", "heads", "method"),
    [({"causal": True}, 4, "all_gather"), ({}, 1, "all_gather"), ({"causal": True}, 4, "ring")],
    ids=["at once", "one by one", "ring"],
)
def test_what_is_sent_and_held(options, heads, method):
    """Over three ranks: keys and values of the others once, and again in the backward, with their gradients."""
    tokens = 1500
    some = tokens * heads * (64 + 32) * 2
    everything = tokens * 4 * (64 + 32) * 2
    for forward, backward in processes().run(counted, 3, options, tokens, heads, method):
        assert forward[0] == everything * 2 // 3
        assert everything * 2 // 3 < backward[0] <= everything * 4 // 3
        # Those that are here and those that come; backward also sums in fp32 and gradients on their way.
        assert forward[1] <= 2 * some + 100
        assert backward[1] <= 6.1 * some


def test_a_window_fetches_what_is_next_to_a_rank():
    for forward, backward in processes().run(
        counted, 3, {"causal": True, "window_size": (99, 0)}, 1500, 4, "all_gather"
    ):
        # Of a segment's neighbour 99 keys, for each of two segments.
        row = 4 * (64 + 32) * 2
        assert forward[0] <= 2 * 2 * 99 * row
        assert backward[0] <= 2 * 2 * 2 * 99 * row
