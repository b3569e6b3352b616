"""The work that is counted is the work that the masks leave."""

import dataclasses
import itertools

import pytest
import torch

from tilewise import workbench
from tilewise.bench.dense import ended_windows, in_blocks, in_window
from tilewise.ops.nsa import reference as nsa
from tilewise.verify.suite import make_fill
from tilewise.workbench.bsa.cases import Bsa
from tilewise.workbench.flash.cases import Flash
from tilewise.workbench.flash.decode.problem import Decode
from tilewise.workbench.hstu.cases import Hstu
from tilewise.workbench.nsa.cases import Nsa
from tilewise.workbench.nsa.cases_compressed import NsaCompressed
from tilewise.workbench.nsa.cases_selected import NsaSelected


def count(name, problem):
    """As a run counts it, on the reference's outputs."""
    from tilewise.verify.implementation import evaluate

    tensors = problem.tensors(make_fill("random", 0))
    outputs = evaluate(problem, workbench.find(name).load("reference"), tensors, torch.float64, None)
    return workbench.find(name).load("bench").pairs(problem, tensors, outputs), tensors, outputs


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (9, 5), (1, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (2, 0), (0, 0), (3, 2), (-1, 4), (100, 100)])
def test_windows(queries, keys, left, right):
    off = keys - queries
    seen = sum(
        (right < 0 or j <= i + off + right) and (left < 0 or j >= i + off - left)
        for i, j in itertools.product(range(queries), range(keys))
    )
    assert in_window(queries, keys, left, right) == seen


def test_blocks():
    indices = torch.tensor([[0, -1], [0, 1], [1, 1], [2, 0]])
    position = torch.tensor([3, 5, 9, 4])[:, None]
    # Blocks of 4: all of block 0; block 0 and keys 4 and 5; block 1, though it is named twice; nothing of block 2,
    # which is later, and block 0.
    assert in_blocks(position, indices, 4) == 4 + (4 + 2) + 4 + (0 + 4)


@pytest.mark.parametrize(("tokens", "size", "stride"), [(33, 8, 4), (7, 8, 4), (64, 32, 16), (10, 1, 1)])
def test_windows_that_have_ended(tokens, size, stride):
    windows = nsa._window_count(tokens, size, stride)
    assert ended_windows(tokens, size, stride) == int(
        nsa._ended(tokens, windows, size, stride, torch.device("cpu")).sum()
    )


@pytest.mark.parametrize(
    "problem",
    [
        Decode(lengths=(9, 0, 3), T=4, new=2, H=2),
        Decode(lengths=(9, 5), leftpad=(4, 0), T=2, H=2, causal=False, window=(3, 1)),
        Decode(lengths=(40, 3), queries=(1, 5), page=16, H=4, Hk=2),
    ],
    ids=str,
)
def test_keys_of_a_cache(problem):
    """A score of 0 and values of 1: a row's LSE is the logarithm of the number of keys that it sees."""
    found, _, outputs = count("flash-decode", dataclasses.replace(problem, scale=0.0))
    assert found == round(float(outputs["lse"].exp().sum()))


@pytest.mark.parametrize(
    "problem",
    [
        Flash(B=2, T=9, Tk=12, H=4, Hk=2, causal=True),
        Flash(lengths=(5, 0, 7), lengths_k=(3, 2, 9), window=(2, 1)),
        Flash(T=8),
    ],
    ids=str,
)
def test_flash(problem):
    """Keys that a query sees have a gradient: v's, where every probability is positive."""
    found, tensors, _ = count("flash", problem)
    seen = 0
    for i in range(tensors["q"].shape[-3]):
        leaf = tensors["v"].detach().requires_grad_()
        from tilewise.ops.flash.reference import flash_attention

        o = flash_attention(**{**tensors, "v": leaf}, **problem.options())[0]
        for b in range(problem.B if not problem.lengths else 1):
            row = o[b, i] if not problem.lengths else o[i]
            for h in range(problem.H):
                (gradient,) = torch.autograd.grad(row[h].sum(), leaf, retain_graph=True)
                seen += int((gradient[..., 0] != 0).sum())
    assert found == seen


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"targets": (2, 0, 3), "attn": 4, "context": 2}], ids=str)
def test_hstu(options):
    """Keys that a query sees have a gradient: v's, where no weight is 0."""
    problem = Hstu(lengths=(9, 0, 12), H=3, D=4, **options)
    found, tensors, _ = count("hstu", problem)
    from tilewise.ops.hstu.reference import hstu_attention

    leaf = tensors["v"].detach().requires_grad_()
    o = hstu_attention(**{**tensors, "v": leaf}, **problem.options())
    seen = 0
    for row in o.sum(-1).flatten():
        (gradient,) = torch.autograd.grad(row, leaf, retain_graph=True)
        seen += int((gradient[..., 0] != 0).sum())
    assert found == seen


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 40}, {"lengths": (20, 0, 33)}], ids=str)
def test_nsa_counts_all_branches(sizes):
    shape = {"H": 4, "Hk": 2, "D": 8, **sizes}
    whole, tensors, outputs = count("nsa", Nsa(**shape, window=5))
    lengths = sizes.get("lengths", (40, 40))
    compressed = 4 * sum(ended_windows(tokens, 8, 4) for tokens in lengths)
    near = 4 * sum(in_window(tokens, tokens, 4, 0) for tokens in lengths)
    indices = outputs["block_indices"].reshape(-1, 2, 4)
    places = [i for tokens in lengths for i in range(tokens)]
    chosen = sum(
        max(0, min(8, i - 8 * int(b) + 1))
        for row, i in zip(indices, places, strict=True)
        for head in row
        for b in head
        if b >= 0
    )
    assert whole == compressed + near + 2 * chosen
    assert count("nsa", Nsa(**shape, gates="cmp"))[0] == compressed
    assert count("nsa-compressed", NsaCompressed(**shape))[0] == compressed
    selected, tensors, _ = count("nsa-selected", NsaSelected(**shape, pattern="holes"))
    named = tensors["block_indices"].reshape(-1, 2, 3)
    assert selected == 2 * sum(
        max(0, min(16, i - 16 * b + 1))
        for row, i in zip(named.tolist(), places, strict=True)
        for head in row
        for b in set(head)
        if b >= 0
    )


def test_bsa_counts_blocks_and_the_window():
    problem = Bsa(lengths=(20, 0, 37), H=2, D=8, block=8, window=5)
    found, _, outputs = count("bsa", problem)
    places = [i for tokens in problem.lengths for i in range(tokens)]
    chosen = sum(
        max(0, min(8, i - 8 * int(b) + 1))
        for head in outputs["block_indices"]
        for row, i in zip(head, places, strict=True)
        for b in row
        if b >= 0
    )
    near = sum(min(5, i + 1) for i in places)
    assert found == chosen + 2 * (near + sum((i + 1) // 8 for i in places))
    assert count("bsa", Bsa(B=3, T=16, H=2, D=8, block=8))[0] == 3 * count("bsa", Bsa(T=16, H=2, D=8, block=8))[0]
