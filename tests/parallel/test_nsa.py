"""Native sparse attention over two, three and four processes gives what one gives."""

import pytest
import torch
from parallel import nsa_ranks
from parallel.nsa_ranks import GATES, sharded, whole
from processes import processes

from tilewise.verify.compare import GRADIENT_FACTOR, OUTPUT_FACTOR, rounding_floor

DENSE, PACKED = [0, 107], [0, 50, 50, 53, 107]
SIZES = (2, 4, 2, 16, 24)


def slow(*values, **options):
    return pytest.param(*values, **options, marks=pytest.mark.slow)


def compare(world, offsets, options, backend, dtype=torch.float32, **plan_options):
    given = SIZES, offsets, dtype, options
    truth = whole(*given[:2], torch.float64, *given[3:], "reference")
    eager = whole(*given, "reference")
    for found in processes().run(sharded, world, *given, backend, plan_options):
        assert truth.keys() <= found.keys()
        for name, x in found.items():
            if name not in truth:
                assert not x.any()
                continue
            exact = truth[name]
            assert x.shape == exact.shape
            if not x.numel():
                continue
            if name == "chosen":
                assert torch.equal(x, exact)
                continue
            error, of_eager = (abs(i.double() - exact).max() for i in (x, eager[name]))
            factor = OUTPUT_FACTOR if name == "o" else GRADIENT_FACTOR
            allowed = factor * of_eager + rounding_floor(dtype, x.device) * abs(exact).max()
            assert error <= allowed, (name, error, allowed)


@pytest.mark.parametrize("offsets", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("learned", [slow(False), True])
def test_it_gives_what_one_process_gives(offsets, learned):
    compare(2, offsets, {"learned": learned}, "cpu")


@pytest.mark.parametrize("gates", [(name,) for name in GATES], ids="".join)
@pytest.mark.parametrize("learned", [False, True])
def test_each_branch_alone(gates, learned):
    compare(3, PACKED, {"gates": gates, "learned": learned}, "cpu", balance="contiguous")


@pytest.mark.parametrize("given", [torch.int32, torch.int64])
def test_blocks_that_are_given(given):
    compare(2, PACKED, {"given": given}, "cpu")


@pytest.mark.parametrize("backend", ["reference", slow("triton")])
def test_every_backend(backend):
    compare(2, PACKED, {"learned": True}, backend)
    compare(2, [0, 45], {"given": torch.int64}, backend)


@pytest.mark.parametrize("world", [slow(1), slow(3), 4])
@pytest.mark.parametrize("learned", [False, True])
def test_more_processes(world, learned):
    compare(world, PACKED, {"learned": learned}, "cpu", heads_at_a_time=1)
    # Shorter than a window, and than the world.
    compare(world, [0, 3], {"learned": learned}, "cpu", balance="contiguous")


@pytest.mark.parametrize("offsets", [slow(DENSE), PACKED], ids=["dense", "packed"])
def test_any_assignment(offsets):
    tokens = offsets[-1]
    compare(3, offsets, {"learned": True}, "cpu", balance=torch.arange(tokens) // 5 % 3)
    # All of it on one rank, and the others empty.
    compare(3, offsets, {}, "cpu", balance=torch.full((tokens,), 1))


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [DENSE, PACKED], ids=["dense", "packed"])
def test_16_bits(offsets):
    compare(2, offsets, {"learned": True}, "cpu", torch.bfloat16)


@pytest.mark.parametrize("offsets", [DENSE, [0, 50, 50, 53, 71, 107], [0, 5], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("balance", ["head_tail", "contiguous", "scattered"])
def test_windows_of_a_learned_compression(offsets, balance):
    if balance == "scattered":
        balance = torch.arange(offsets[-1]) // 3 % 3
    processes().run(nsa_ranks.windows, 3, offsets, balance, 8, 4)
    processes().run(nsa_ranks.windows, 3, offsets, balance, 3, 3)


def test_a_plan_is_freed_and_its_windows_with_it():
    processes().run(nsa_ranks.freed, 2)


def test_a_plan_of_one_process_is_for_its_own_tokens():
    for message in processes().run(nsa_ranks.of_one, 1):
        assert (
            message
            == "q has 60 tokens in axis 1 (got shape [1, 60, 4, 16]): rank 0 of the plan holds 80; use plan.shard"
        )


def test_learned_windows_alone_send_no_keys():
    assert processes().run(nsa_ranks.sent_for_windows_alone, 2) == [0, 0]


@pytest.mark.slow
def test_inside_torch_compile_a_plan_is_run_as_it_stands():
    for eager, first, second, graphs in processes().run(nsa_ranks.compiled, 2):
        for found in (first, second):
            for x, y in zip(found, eager, strict=True):
                torch.testing.assert_close(x, y)
        assert graphs <= 6


def test_bad_input():
    for messages in processes().run(nsa_ranks.refused, 2):
        assert messages == [
            "the plan's method is 'ring': native_sparse_attention takes a plan of method 'all_gather'",
            "cu_seqlens is given with parallel: the plan has the offsets of its batch; leave cu_seqlens out",
            "k_cmp has 9 windows: expected 19, those of the plan's whole sequences, on every rank; `plan.windows` makes"
            " them",
            "block_indices holds 10 at [0, 0, 0, 0]: expected -1 (no block) or 0 to 9, for there are 10 blocks",
            "q has 39 tokens in axis 1 (got shape [1, 39, 4, 16]): rank # of the plan holds 40; use plan.shard",
            "attention over a ContextPlan has no derivative of its own (double backward): call it with"
            " backend='reference', which torch can differentiate any number of times",
        ]
