"""The scripts that time whole operators, at their shortest and on the CPU; and the documents that were saved before."""

import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import decode
import flash
import flash_layouts
import flash_options
import flash_short
import harness
import hstu
import minimax
import nsa
import nsa_decode
import pytest
import step_bits
import table
import torch
import training_step
from fake_flash_attn import fake_flash_attn, no_flash_attn  # noqa: F401
from torch.overrides import TorchFunctionMode

from tilewise.bench.result import load
from tilewise.bench.timing import Clock

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads(files("tilewise.bench").joinpath("report.schema.json").read_text())
RESULTS = sorted((Path(harness.__file__).parent / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_saved_results_are_documents_with_a_table(path):
    document = load(path)
    jsonschema.validate(document, SCHEMA)
    header, rule, *rows = table.table(path).splitlines()
    assert header.startswith("| ")
    assert set(rule) == set("|- ") or set(rule) == set("|-")
    assert len(rows) >= 1


class OnTheCpu(TorchFunctionMode):
    """Tensors for a GPU are made on the CPU."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = {**(options or {})}
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return function(*arguments, **options)


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    monkeypatch.setattr(harness, "need_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    scripts = (decode, nsa_decode, flash, flash_layouts, flash_options, flash_short, hstu, minimax, training_step)
    for script in scripts:
        monkeypatch.setattr(script, "Clock", lambda device: Clock(torch.device("cpu")))
        if hasattr(script, "take_turns"):
            brief = script.take_turns
            monkeypatch.setattr(script, "take_turns", lambda *given, brief=brief, **_: brief(*given, seconds=0.0))
    for script in (decode, nsa_decode, flash):
        monkeypatch.setattr(script, "host_times", lambda calls, *_, **__: {name: {"host": 1.26} for name in calls})
    for script in (decode, nsa_decode):
        monkeypatch.setattr(script, "captured", lambda step: step)
    for script in (flash_short, hstu):
        monkeypatch.setattr(script, "graph_milliseconds", lambda clock, step: clock.run([step], 1)[0])
    with OnTheCpu():
        yield


def run(script, monkeypatch, tmp_path, capsys):
    """The document that the script saves, and the table that it ends with."""
    path = tmp_path / "figures.json"
    monkeypatch.setattr("sys.argv", [script.__name__, "--json", str(path)])
    script.main()
    document = load(path)
    jsonschema.validate(document, SCHEMA)
    name = Path(script.__file__).stem
    assert (document["benchmark"], document["command"]) == (name, f"python benchmarks/{name}.py")
    assert document["environment"]["torch"] in torch.__version__
    printed = capsys.readouterr().out
    assert printed.endswith(table.table(path) + "\n")
    # What is measured is said before it is, not after.
    assert re.match(r" +0 s  \w", printed)
    return document


@pytest.mark.usefixtures("on_the_cpu")
def test_decode(monkeypatch, tmp_path, capsys):
    shapes = (
        decode.Shape(2, 1, 64, 4, 2, 16),
        decode.Shape(2, 1, 64, 4, 2, 16, page=16),
        decode.Shape(1, 65, 64, 4, 2, 16),
    )
    monkeypatch.setattr(decode, "shapes", lambda: iter(shapes))
    monkeypatch.setattr(decode, "COLD_BYTES", 2 * shapes[0].cache_bytes)
    monkeypatch.setattr(decode, "BASELINES", {"fa2": decode.SDPBackend.MATH})
    step, paged, prefill, called = run(decode, monkeypatch, tmp_path, capsys)["rows"]
    assert list(step["graph_milliseconds"]) == ["tilewise", "fa2"]
    assert list(paged["graph_milliseconds"]) == list(prefill["graph_milliseconds"]) == ["tilewise", "dense"]
    assert called["microseconds"] == {"tilewise": 1.3, "sdpa": 1.3}


@pytest.mark.usefixtures("on_the_cpu")
def test_nsa_decode(monkeypatch, tmp_path, capsys):
    shapes = nsa_decode.Shape(2, 160, 4, 2, 16), nsa_decode.Shape(1, 160, 4, 2, 16, page=16)
    monkeypatch.setattr(nsa_decode, "shapes", lambda: iter(shapes))
    monkeypatch.setattr(nsa_decode, "COLD_BYTES", shapes[0].compressed_bytes)
    monkeypatch.setattr(nsa_decode, "CALLED", shapes[0])

    def once(_, calls, **__):
        return {name: SimpleNamespace(median=1.0, result=call()) for name, call in calls.items()}

    monkeypatch.setattr(nsa_decode, "take_turns", once)
    *steps, called = run(nsa_decode, monkeypatch, tmp_path, capsys)["rows"]
    assert [row["copies"] for row in steps] == [1, 2]
    assert all(list(row["graph_milliseconds"]) == ["nsa", "dense"] for row in steps)
    assert called["microseconds"] == {"nsa": 1.3, "dense": 1.3}


@pytest.mark.usefixtures("on_the_cpu", "no_flash_attn")
def test_flash(monkeypatch, tmp_path, capsys):
    shapes = flash.Shape(1, 64, 2, 32), flash.Shape(0, 0, 4, 32, 2, 16, lengths=(5, 9))
    monkeypatch.setattr(flash, "SHAPES", shapes)
    monkeypatch.setattr(flash, "compile_kernels", lambda: [flash._run_once((shape, True)) for shape in shapes])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    *rows, overhead = run(flash, monkeypatch, tmp_path, capsys)["rows"]
    assert [(row["case"], row["direction"]) for row in rows] == [
        (f"{name}{mask}", direction)
        for name in ("B 1, T 64, H 2, D 32", "2 packed, H 4 / 2, D 32 / 16")
        for mask in ("", ", causal")
        for direction in ("forward", "backward")
    ]
    assert {name for row in rows for name in row["milliseconds"]} >= {"tilewise", "tilewise free"}
    assert shapes[1].operations(True, "backward") == 2.5 * 0.5 * 2 * 4 * (25 + 81) * 48
    assert not any("flash-attn-4" in row["ratio"] for row in rows)
    assert overhead["microseconds"] == {"inference": 1.3, "training": 1.3}


@pytest.mark.usefixtures("on_the_cpu", "fake_flash_attn")
def test_flash_beside_flash_attention_4(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flash, "SHAPES", (flash.Shape(1, 64, 2, 32), flash.Shape(0, 0, 2, 32, lengths=(5, 9))))
    monkeypatch.setattr(flash, "compile_kernels", lambda: None)
    monkeypatch.setattr(flash, "take_turns", lambda _, calls: {name: SimpleNamespace(median=1.0) for name in calls})
    document = run(flash, monkeypatch, tmp_path, capsys)
    forward, backward = document["rows"][:2]
    assert [name for name in forward["ratio"] if "-4" in name] == ["flash-attn-4"]
    assert [name for name in backward["ratio"] if "-4" in name] == ["flash-attn-4", "flash-attn-4-fixed"]
    calls = sys.modules["flash_attn.cute"].calls
    assert {call["shape"] for call in calls} == {(1, 64, 2, 32), (14, 2, 32)}
    assert [call["max_seqlen_q"] for call in calls if "max_seqlen_q" in call] == [9] * 4
    assert {(call["causal"], call["deterministic"]) for call in calls} == {
        (causal, fixed) for causal in (False, True) for fixed in (False, True)
    }
    header = table.flash_lines(document)[0]
    assert re.search(r"forward TFLOP/s .*\| × FA-4 \| backward TFLOP/s .*\| × FA-4 \| × FA-4 fixed \|$", header)


@pytest.mark.usefixtures("on_the_cpu", "fake_flash_attn")
def test_flash_short(monkeypatch, tmp_path, capsys):
    for name, values in (("LENGTHS", (16,)), ("HEADS", (2,)), ("WIDTHS", (32,))):
        monkeypatch.setattr(flash_short, name, values)
    rows = run(flash_short, monkeypatch, tmp_path, capsys)["rows"]
    assert [row["case"] for row in rows] == [
        f"B 1, T 16, H 2, D 32{mask}, {kind}" for mask in ("", ", causal") for kind in ("forward", "step")
    ]
    assert {"tilewise", "tilewise free", "flash-attn-4"} <= set(rows[-1]["graph_milliseconds"])
    assert all(row["to_the_best_other"] > 0 for row in rows)


@pytest.mark.usefixtures("on_the_cpu")
def test_flash_options(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flash_options, "SHAPES", (flash.Shape(1, 40, 2, 16),))
    monkeypatch.setattr(flash_options, "WINDOW", 9)
    rows = run(flash_options, monkeypatch, tmp_path, capsys)["rows"]
    assert [list(row["milliseconds"]) for row in rows] == [["plain", "fp16", "softcap", "window"]] * 2
    assert flash_options.shares(flash.Shape(1, 40, 2, 16))["window"] == (10 * 40 - 45) / (40 * 41 / 2)


@pytest.mark.usefixtures("on_the_cpu")
def test_minimax(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(minimax, "LENGTHS", (64,))
    monkeypatch.setattr(minimax, "CHANNELS", 8)
    monkeypatch.setattr(minimax, "BLOCK", 4)
    monkeypatch.setattr(minimax, "DENSE", {"fa2": minimax.SDPBackend.MATH})
    monkeypatch.setattr(nsa.torch, "Generator", lambda device, made=torch.Generator: made())
    forward, backward = run(minimax, monkeypatch, tmp_path, capsys)["rows"]
    assert list(forward["milliseconds"]) == list(backward["milliseconds"]) == [*minimax.KINDS, "tilewise dense", "fa2"]
    assert [list(row["speedup"]) for row in (forward, backward)] == [list(minimax.KINDS)] * 2


@pytest.mark.transformers
@pytest.mark.usefixtures("on_the_cpu")
def test_training_step(monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setattr(training_step, "SHAPE", sizes | {"num_attention_heads": 4, "num_key_value_heads": 2})
    monkeypatch.setattr(training_step, "CASES", ((40, False), (40, True)))
    monkeypatch.setattr(training_step, "PIECE", 16)
    monkeypatch.setattr(training_step, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    step = training_step.Training.step

    def too_large(self, name):
        if name == "eager":
            raise torch.OutOfMemoryError
        step(self, name)

    monkeypatch.setattr(training_step.Training, "step", too_large)
    for row in run(training_step, monkeypatch, tmp_path, capsys)["rows"]:
        assert list(row["milliseconds"]) == ["tilewise", "sdpa"]
        assert row["cannot_run"]["eager"] == "out of memory"
        assert "No viable backend" in row["cannot_run"]["sdpa cudnn"]


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_flash_layouts(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flash_layouts, "WIDTHS", ((8, 32),))
    monkeypatch.setattr(flash_layouts, "LONGEST", 8)
    monkeypatch.setattr(flash_layouts, "BATCHES", ((2, 16),))
    document = run(flash_layouts, monkeypatch, tmp_path, capsys)
    assert len(document["about"]["lengths"]) == flash_layouts.SEQUENCES
    assert [sorted(row["milliseconds"]) for row in document["rows"]] == [["equal", "groups", "unequal"]] * 4 + [
        ["equal", "groups"]
    ] * 4


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_hstu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hstu, "DENSE", ((2, 64, 2, 16, 16),))
    monkeypatch.setattr(hstu, "SPARSE", ((1, 64, 4, 16, 32),))
    full, jagged, sparse = run(hstu, monkeypatch, tmp_path, capsys)["rows"]
    assert (full["kind"], full["lengths"], jagged["lengths"], sparse["kind"]) == (
        "dense",
        "full",
        "jagged",
        "block-sparse",
    )
    assert "torch step" in full["milliseconds"]
    assert list(jagged["milliseconds"]) == ["dense forward", "dense backward", "dense step"]
    assert set(sparse["graph_milliseconds"]) == set(sparse["milliseconds"])
    assert set(full["tflops"]) == set(full["graph_tflops"]) == {"forward", "backward"}


def test_bits_of_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step_bits.py", "--backend", "cpu"])
    monkeypatch.setattr(step_bits, "TOKENS", 40)
    monkeypatch.setattr(step_bits, "SAMPLE", (0, 17, 39))
    step_bits.main()
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header == "| dtype, D | compared | elements that differ | largest difference, ULPs | errors, ULPs |"
    assert len(rows) == 42
    differences = [float(row.split(" | ")[3]) for row in rows]
    assert all(float(error) < 4 for row in rows for error in row.split(" | ")[4].rstrip(" |").split(", "))
    assert max(differences[:28]) <= 1
    assert 0 < max(differences[28:]) < 64
