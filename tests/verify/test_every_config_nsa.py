"""Every tile configuration of native sparse attention's kernels against the reference; a wrong one is told from the
others.
"""

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops._host.backend import as_if_on
from tilewise.ops.flash import launch
from tilewise.ops.flash.configs import SHARED_MEMORY
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.choose import launch as choose
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs
from tilewise.verify.every_config import Choice, Request, run_entries
from tilewise.workbench.flash import configs as flash
from tilewise.workbench.nsa import configs as nsa_selected

ENTRIES = {"nsa-selected": nsa_selected.entries(), "nsa-compressed": flash.entries()}
# Interpreted, these take a second or two.
QUICK = (
    "lists_fwd-fp32-d128",
    "union_fwd-fp32-d128",
    "union_dq-fp32-d128",
    "lists_bwd-fp32-d128",
    "scores-fp32-d128",
    "fwd-fp32-d64",
    "dq-fp32-d64",
)


def invoke(*words):
    return CliRunner().invoke(cli.app, ["sanity", *words])


def number_of(operator, start):
    return next(i for i, entry in enumerate(ENTRIES[operator]) if entry.short.startswith(start))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("operator", "number"),
    [
        pytest.param(
            operator,
            i,
            id=f"{operator}-{entry.short}",
            marks=() if entry.short.startswith(QUICK) or torch.cuda.is_available() else pytest.mark.slow,
        )
        for operator, table in ENTRIES.items()
        for i, entry in enumerate(table)
    ],
)
def test_every_configuration_agrees(operator, number):
    (line, right), *_ = run_entries(Request(operator, kernel=number))
    assert right, line


def test_the_table_is_whole():
    table = ENTRIES["nsa-selected"]
    assert {(entry.element_size, entry.kernel) for entry in table} == set(configs.TABLE)
    assert {entry.config for entry in table} >= {config for row in configs.TABLE.values() for config in row}
    assert len({entry.short for entry in table}) == len(table)
    for entry in table:
        assert entry.fits()
        # Run as if on the first of its families, it is the one that is run.
        card = nsa_selected.CARDS[entry.families[0]]
        assert configs.choose(entry.kernel, entry.channels, entry.element_size, card) == entry.config
        assert entry.shared_memory <= SHARED_MEMORY[entry.families[0]]


def test_every_family_is_run():
    assert {family for entry in ENTRIES["nsa-selected"] for family in entry.families} == set(SHARED_MEMORY)


@pytest.mark.parametrize("operator", ENTRIES)
def test_list(operator):
    listed = invoke(operator, "--list")
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    assert len(lines) == len(ENTRIES[operator])
    # Columns line up.
    assert len({line.index(" MFLOP") for line in lines}) == 1


def test_wrong_usage():
    assert invoke("nsa-selected", "--kernel", "999").exit_code == 2


@pytest.mark.parametrize("order", ["lists", "union"])
def test_a_wrong_kernel_fails_and_is_placed(monkeypatch, order):
    right = getattr(selected, f"_forward_{order}")

    def wrong(inputs, o, *rest):
        right(inputs, o, *rest)
        o[0, 5, 1, 3] += 1.0

    monkeypatch.setattr(selected, f"_forward_{order}", wrong)
    outcome = invoke(
        "nsa-selected", "--kernel", str(number_of("nsa-selected", f"{order}_fwd-fp32-d128")), "--small", "--diff"
    )
    assert outcome.exit_code == 1, outcome.output
    assert "o: 1 of 32768 mismatched" in outcome.output
    assert "o mismatches by row: 5: 1" in outcome.output
    assert "FAIL: 1 of 1 configurations are wrong" in outcome.output


def test_windows_that_are_seen_too_early_fail(monkeypatch):
    right = launch.forward
    monkeypatch.setattr(
        launch, "forward", lambda inputs, config: right(inputs._replace(right=inputs.right + 1), config)
    )
    outcome = invoke(
        "nsa-compressed", "--kernel", str(number_of("nsa-compressed", "fwd-fp32-d64")), "--small", "--diff"
    )
    assert outcome.exit_code == 1, outcome.output
    # A token that sees the first window, or a further one, before its end.
    assert "lse mismatches by row: 30: 2, 46: 2, 62: 2, " in outcome.output


def test_a_wrong_choice_fails(monkeypatch):
    right = choose.choose

    def wrong(*arguments):
        indices = right(*arguments)
        # The last block that is chosen is the token's own, which always is.
        indices[0, 40, 0, -1] = -1
        return indices

    monkeypatch.setattr(nsa_selected, "choose", wrong)
    outcome = invoke(
        "nsa-selected", "--kernel", str(number_of("nsa-selected", "scores-fp32-d128")), "--small", "--diff"
    )
    assert outcome.exit_code == 1, outcome.output
    assert "indices: at [0, 40, 0] block 10, which is always chosen, is not in" in outcome.output


def test_choices_are_judged_by_score():
    scores = torch.tensor([[torch.inf, 1.0, 2.0, 2.0 + 1e-9]], dtype=torch.float64)
    assert Choice(torch.tensor([[0, 2]]), scores, scores.float()).right
    low = Choice(torch.tensor([[0, 1]]), scores, scores.float())
    assert not low.right
    assert "a score 1 below what it should be" in low.text
    assert Choice(torch.tensor([[0, 3]]), scores, scores.float()).text == "indices: all 1 choices are the best"


@pytest.mark.parametrize("order", ["union_fwd", "union_dq"])
def test_configurations_of_the_query_order_run_in_query_order(order):
    """Where it cannot serve, the launcher would take the other."""
    for entry in ENTRIES["nsa-selected"]:
        if entry.kernel == order:
            with as_if_on(nsa_selected.CARDS[entry.families[0]]):
                q, k = (
                    torch.zeros(
                        1, 8, heads, entry.channels, dtype={2: torch.bfloat16, 4: torch.float32}[entry.element_size]
                    )
                    for heads in (nsa_selected.HEADS, 1)
                )
                indices = torch.zeros(1, 8, 1, nsa_selected.SLOTS, dtype=torch.int32)
                inputs = make_inputs(q, k, k, indices, None, nsa_selected.BLOCK, 1.0)
                assert inputs.union_tokens(order) == entry.config.block_m // nsa_selected.HEADS
