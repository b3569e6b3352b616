"""`tilewise inspect`: what it prints, compares, saves and refuses. Nothing is compiled but in the tests at the end."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise import workbench
from tilewise.cli import app
from tilewise.inspect import command
from tilewise.inspect.facts import Facts, Row, read_rows, write_rows
from tilewise.inspect.text import diff_lines, line

FACTS = Facts(
    "flash_fwd_kernel", 90, 128, 0, 0, 1024, 0, 4, True, False, True, False, False, False, "13.4.59", spills_in_loops=0
)
ROW = Row(90, "flash", "D 64 causal", "forward", "flash_fwd_kernel", FACTS)
MIX = {
    "matrix": 24,
    "exp2": 132,
    "fma": 156,
    "global loads": 9,
    "shared loads": 5,
    "stores": 10,
    "barriers": 64,
    "local": 0,
    "all": 1992,
}
TINY = Path(__file__).with_name("tiny_implementations.py")


def inspect(*words, code=0):
    result = CliRunner().invoke(app, ["inspect", *map(str, words)])
    assert result.exit_code == code, result.output
    return result.output


def test_a_line_says_all():
    text = line(
        replace(ROW, facts=replace(FACTS, spill_stores=52, spill_loads=152, wgmma_serialised=True, tma=True, mix=MIX))
    )
    assert (
        text == "sm_90 flash D 64 causal: flash_fwd_kernel: 128 registers; spills 52 bytes (152 loaded); 1.0 of 227 KB"
        " shared; wgmma serialised tma; mma 24, ex2 132, fma 156, ldg 9, lds 5, st 10, bar 64; 4 x 4 of 64 warps"
        " (registers)"
    )
    assert "DOES NOT FIT" in line(replace(ROW, facts=replace(FACTS, shared_memory=240_000)))
    assert "no instruction mix: nvdisasm cannot read it; 4 x 4" in line(replace(ROW, error="nvdisasm cannot read it"))
    assert line(replace(ROW, facts=None, error="it is too large")).endswith("does not compile: it is too large")


def test_a_diff_shows_what_changed():
    wide = replace(ROW, label="D 128 causal")
    slower = replace(ROW, facts=replace(FACTS, registers=255, spill_stores=8))
    assert diff_lines([ROW, wide], [slower, wide]) == [
        "sm_90 flash D 64 causal: flash_fwd_kernel",
        "    registers 128 -> 255",
        "    spill stores 0 -> 8",
        "    CTAs an SM 4 -> 2",
        "    warps an SM 16 -> 8",
    ]
    assert diff_lines([ROW, wide], [ROW, wide]) == ["nothing changed in 2 kernels"]
    # An instruction mix that one side was not asked for.
    assert diff_lines([ROW], [replace(ROW, facts=replace(FACTS, mix=MIX))]) == ["nothing changed in 1 kernels"]


def test_a_diff_pairs_kernels():
    other = replace(ROW, label="5 fwd", kernel="my_kernel", facts=replace(FACTS, registers=40))
    lines = diff_lines([ROW], [other])
    assert lines[0] == "sm_90 flash D 64 causal: flash_fwd_kernel -> flash 5 fwd: my_kernel"
    # There is one kernel more, so nobody knows which is which.
    assert diff_lines([ROW], [other, replace(other, kernel="another")]) == [
        "sm_90 flash D 64 causal: flash_fwd_kernel: only in the first",
        "sm_90 flash 5 fwd: my_kernel: only in the second",
        "sm_90 flash 5 fwd: another: only in the second",
    ]
    assert diff_lines([ROW], [replace(ROW, facts=None, error="too large")])[1] == "    compiled -> too large"


def test_a_new_configuration_changes_none_of_those_that_it_renumbers():
    old = [replace(ROW, label=label) for label in ("0 first", "1 second")]
    new = [replace(ROW, label=label) for label in ("0 first", "1 new", "2 second")]
    old[1], new[2] = (replace(row, facts=replace(FACTS, registers=99)) for row in (old[1], new[2]))
    assert [line for line in diff_lines(old, new) if "->" in line] == []
    assert len(diff_lines(old, new)) == 1
    assert "1 new" in diff_lines(old, new)[0]


def test_what_is_saved_is_read_and_compared(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    rows = [replace(ROW, facts=replace(FACTS, mix=MIX)), replace(ROW, architecture=86, facts=None, error="no")]
    write_rows(old, rows, {"triton": "3"}, "tilewise inspect flash")
    write_rows(new, [replace(ROW, facts=replace(FACTS, registers=40, mix=MIX)), rows[1]], {}, "")
    assert read_rows(old) == rows
    document = json.loads(old.read_text())
    assert (document["schema"], document["version"], document["environment"], document["command"]) == (
        "tilewise.inspect",
        1,
        {"triton": "3"},
        "tilewise inspect flash",
    )
    assert document["kernels"][0]["occupancy"] == {"blocks": 4, "warps": 16, "limit": "registers"}
    assert "registers 128 -> 40" in inspect(old, "--diff", new)
    assert "nothing changed in 1 kernels" in inspect(old, "--diff", new, "--arch", "sm_86")
    assert "no" in inspect(old, "--arch", "sm_86")


def test_a_saved_file_is_older_than_what_is_compiled_now(tmp_path, monkeypatch):
    write_rows(tmp_path / "old.json", [ROW], {}, "")
    monkeypatch.setattr(command, "_compile", lambda *_: [replace(ROW, facts=replace(FACTS, registers=40))])
    assert "registers 128 -> 40" in inspect("flash", "--diff", tmp_path / "old.json")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "name an operator"),
        (("conv",), "there is no operator 'conv'"),
        (("flash", "--arch", "sm_90,sm_91"), "there is no architecture 'sm_91'"),
        (("flash", "--direction", "up"), "there is no direction 'up'"),
        (("flash", "--dtype", "int8"), "there is no dtype 'int8'"),
        (("flash", "--config", "D=64"), "--config D=64: expected the number"),
        (("flash", "--diff", "3"), "--diff 3: expected FILE.py:FUNCTION"),
        (("flash", "--update"), "give both"),
        (("flash", "--check"), "nothing else"),
        (("--check", "--arch", "sm_90"), "nothing else"),
        (("flash", "--json", "no/such/folder.json"), "expected the name of a file"),
        (("no_such.json",), "expected a file that tilewise inspect --json wrote"),
        ((str(command.FILE),), "its schema is not tilewise.inspect"),
    ],
)
def test_wrong_usage(words, says):
    assert says in inspect(*words, code=2)


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"schema": "tilewise.inspect", "version": 0, "kernels": []}))
    assert "has version 0" in inspect(path, code=2)
    write_rows(path, [ROW], {}, "")
    assert "so expected another one" in inspect(path, "--diff", "3", code=2)


SMALL = replace(ROW, architecture=86, facts=replace(FACTS, architecture=86, wgmma=False))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            replace(ROW, facts=replace(FACTS, spill_stores=8, spill_loads=4)),
            "spills 12 bytes (8 stored, 4 loaded), allowed are 11",
        ),
        (
            replace(ROW, kernel="other", facts=replace(FACTS, spill_stores=1)),
            "spills 1 bytes (1 stored, 0 loaded), allowed are 0",
        ),
        (
            replace(ROW, facts=replace(FACTS, spill_stores=8, spills_in_loops=2)),
            "spills in a loop (2 instructions), allowed are 0",
        ),
        (
            replace(ROW, facts=replace(FACTS, spill_stores=8, spills_in_loops=None)),
            "spills, and its SASS cannot be read: it may be in a loop",
        ),
        (
            replace(ROW, facts=replace(FACTS, shared_memory=232_449)),
            "takes 232,449 bytes of shared memory, and a block may have 232,448",
        ),
        (replace(ROW, facts=replace(FACTS, wgmma=False)), "multiplies without wgmma"),
        (replace(ROW, facts=replace(FACTS, wgmma_serialised=True)), "its wgmma are serialised"),
        (replace(ROW, facts=None, error="too large"), "does not compile: too large"),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_named(row, says):
    allowed = command.Allowances(spilled={"sm_90": {ROW.place: 11}})
    assert command.violations([row], allowed) == [f"sm_90 {row.place}: {says}"]
    # What is measured is allowed, but for what does not fit or compile.
    beyond = row.facts is None or row.facts.shared_memory > 232_448 or row.facts.spills_in_loops is None
    assert bool(command.violations([row], command.measured([row]))) == beyond


def test_what_keeps_to_the_rules():
    allowed = command.Allowances(spilled={"sm_90": {ROW.place: 11}})
    spilling = replace(ROW, facts=replace(FACTS, spill_stores=11))
    adding = replace(ROW, facts=replace(FACTS, multiplies=False, wgmma=False))
    assert command.violations([ROW, spilling, adding, SMALL], allowed) == []


def test_a_persistent_kernel_may_spill_at_the_end_of_an_item():
    """Which is inside of its loop over items."""
    row = replace(ROW, kernel="flash_bwd_hopper_kernel", facts=replace(FACTS, spill_stores=8, spills_in_loops=2))
    assert command.violations([row], command.Allowances(spilled={"sm_90": {row.place: 8}})) == []


@pytest.mark.parametrize(
    ("architecture", "limit"), [(80, 166_912), (86, 101_376), (89, 101_376), (100, 232_448), (120, 101_376)]
)
def test_shared_memory_is_held_to_what_each_card_has(architecture, limit):
    facts = replace(FACTS, architecture=architecture, wgmma=False)
    row = replace(ROW, architecture=architecture, facts=facts)
    assert architecture in command.ARCHITECTURES
    assert command.violations([replace(row, facts=replace(facts, shared_memory=limit))], command.Allowances()) == []
    (line, *_) = command.violations([replace(row, facts=replace(facts, shared_memory=limit + 1))], command.Allowances())
    assert f"takes {limit + 1:,} bytes of shared memory, and a block may have {limit:,}" in line


def test_every_operator_fits_the_smallest_card():
    large = replace(SMALL, facts=replace(SMALL.facts, shared_memory=101_377))
    lines = command.violations([large, replace(SMALL, operator="nsa")], command.Allowances())
    assert lines[1:] == ["sm_86 flash: no configuration fits 101,376 bytes of shared memory"]
    assert len(command.violations([large, replace(SMALL, label="D 64 packed")], command.Allowances())) == 1


def test_only_update_writes_the_allowances(tmp_path, monkeypatch):
    file = tmp_path / "allowances.json"
    monkeypatch.setattr(command, "FILE", file)
    rows = [replace(ROW, facts=replace(FACTS, spill_stores=8)), SMALL]
    monkeypatch.setattr(command, "_compile", lambda *_: rows)
    command.write_allowances(command.Allowances())
    before = file.read_text()
    assert "✗ sm_90 flash D 64 causal: flash_fwd_kernel: spills 8 bytes" in inspect("--check", code=1)
    assert file.read_text() == before
    assert "PASS: all 2 kernels" in inspect("--check", "--update")
    assert command.read_allowances().spilled == {"sm_90": {ROW.place: 8}}
    assert "PASS" in inspect("--check")
    rows[0] = replace(ROW, facts=replace(FACTS, spill_stores=9, ptxas="14.0"))
    output = inspect("--check", code=1)
    assert "FAIL: 1 findings in 2 kernels" in output
    assert "here it is {'sm_90': '14.0'" in output


@pytest.mark.slow
def test_from_the_command_to_the_compiler(tmp_path, monkeypatch):
    """Two architectures, each in processes of its own; a function that is refused there is wrong usage here."""
    monkeypatch.setitem(os.environ, "TRITON_CACHE_DIR", str(tmp_path))
    saved = tmp_path / "rows.json"
    words = ("flash", "--impl", f"{TINY}:tuned", "--config", "T=65,D=16")
    output = inspect(*words, "--arch", "sm_86,sm_90", "--sass", "--json", saved)
    rows = read_rows(saved)
    assert [(row.architecture, row.kernel, row.label) for row in rows] == [
        (architecture, kernel, "T=65,D=16")
        for architecture in (86, 90)
        for kernel in ("tiny_tuned_kernel", "tiny_tuned_kernel (2)", "tiny_tuned_kernel (3)")
    ]
    assert all(row.facts.mix["global loads"] for row in rows)
    assert output.count("EXIT") >= 4


@pytest.mark.slow
def test_what_a_process_refuses_is_wrong_usage():
    assert "launches no Triton kernel" in inspect("flash", "--impl", f"{TINY}:silent", "--arch", "sm_90", code=2)
    assert "expected 0 to" in inspect("hstu", "--config", "999", "--arch", "sm_90", code=2)
    assert "there are no tile configurations of 'nsa'" in inspect("nsa", "--config", "0", "--arch", "sm_90", code=2)
    assert "add --dtype bf16" in inspect("flash", "--config", "0", "--arch", "sm_90", "--dtype", "fp32", code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [
        "flash",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("nsa-compressed", "nsa-selected", "hstu", "bsa")),
    ],
)
def test_configurations_are_those_that_sanity_numbers(operator):
    number, entry = next(
        (i, entry)
        for i, entry in enumerate(workbench.find(operator).load("configs").entries())
        if "fwd" in entry.kernel and entry.element_size == 2
    )
    output = inspect(operator, "--config", number, "--arch", "sm_86", "--diff", number)
    assert output.strip() == "nothing changed in 1 kernels"
    assert f"sm_86 {operator} {number} {entry.short}: " in inspect(operator, "--config", number, "--arch", "sm_86")
