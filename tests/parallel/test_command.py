"""`tilewise parallel-plan`."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import app
from tilewise.parallel.assignment import assign
from tilewise.parallel.estimate import flash_estimate, sparse_estimate
from tilewise.parallel.traffic import Layer

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def run(*words):
    found = CliRunner().invoke(app, ["parallel-plan", *words])
    return found.exit_code, found.output


SIZES = ("--heads", "64/4", "--dim", "128")
LINE = re.compile(r"^ *\d+ +\d+( +[\d.e+-]+){9} *$", re.M)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_one_sequence(method, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "plan.png"
    code, said = run("--tokens", "1000000", *SIZES, "--world", "8", "--method", method, "--plot", str(picture))
    assert code == 0
    # A line a rank; sparse attention has no ring.
    assert len(LINE.findall(said)) == (16 if method == "all_gather" else 8)
    assert ("native_sparse_attention has no ring" in said) == (method == "ring")
    assert "largest over mean: work 1.000, tokens 1.000" in said
    assert re.search(r"measured calls on one NVIDIA H200, off by [\d.]+% on average and [\d.]+% at most", said)
    # An eighth of 4 · 64 · 128 · T² / 2.
    assert re.search(r"^ +0 +125000 +2048 +5120 ", said, re.M)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_packed_sequences():
    code, said = run("--lengths", "20000,1000x3,0,7", *SIZES, "--world", "2")
    assert code == 0
    assert re.search(r"this assignment 1\.00\d, head_tail 1\.\d+, contiguous 1\.[3-9]", said)
    assert "cut head-tail: sequences 0\n" in said
    whole = dict(re.findall(r"^whole on rank (\d): (.*)$", said, re.M))
    assert whole == {"0": "sequences 1, 3", "1": "sequences 2, 5"}


def test_no_tokens_at_all():
    code, said = run("--lengths", "0,0", "--heads", "8", "--dim", "64/32", "--world", "3")
    assert code == 0
    assert "largest over mean: work 1.000" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--world", "2", *SIZES), "give one of them"),
        (("--world", "2", *SIZES, "--tokens", "8", "--lengths", "8"), "give one of them"),
        (("--world", "2", *SIZES, "--lengths", "8,9y3"), "not '9y3'"),
        (("--world", "2", *SIZES, "--tokens", "8", "--method", "broadcast"), "expected all_gather or ring"),
        (("--world", "2", *SIZES, "--tokens", "8", "--link-gb-per-s", "0"), "expected a rate above 0"),
        (("--world", "2", *SIZES, "--tokens", "8", "--plot", "plan.txt"), "expected a name that ends in"),
        (("--world", "2", *SIZES, "--tokens", "8", "--plot", "nowhere/plan.png"), "there is no folder nowhere"),
        (("--world", "2", "--heads", "6/4", "--dim", "8", "--tokens", "8"), "must be a multiple"),
        (("--world", "2", "--heads", "6/4/2", "--dim", "8", "--tokens", "8"), "--heads 6/4/2: expected"),
        (("--world", "2", "--heads", "4", "--dim", "512", "--tokens", "8"), "256 channels at most"),
    ],
)
def test_wrong_usage(words, message):
    code, said = run(*words)
    assert code == 2
    assert message in " ".join(said.split())


def test_the_table_of_the_page_is_what_it_predicts():
    rows = re.findall(r"^\| ([\d,]+ \| [\d,]+ \| \d+(?: \| [\d.]+){6}) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) == 7
    for row in rows:
        tokens, world, link, *shown = (float(cell.replace(",", "")) for cell in row.split(" | "))
        bounds = torch.tensor([0, int(tokens)])
        given = bounds, assign(bounds, int(world), "head_tail"), int(world), Layer(64, 4, 128, 128)
        found = [flash_estimate(*given, method, link * 1e9) for method in ("all_gather", "ring")]
        found.append(sparse_estimate(*given, link * 1e9))
        for one, milliseconds, gigabytes in zip(found, shown[::2], shown[1::2], strict=True):
            seconds = (one.forward.seconds + one.backward.seconds).max().item()
            memory = torch.maximum(one.forward.memory, one.backward.memory).max().item()
            assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.005)
            assert memory * 1e-9 == pytest.approx(gigabytes, rel=0.005)
