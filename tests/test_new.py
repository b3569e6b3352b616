"""`tilewise new`: the files it writes pass the commands it prints, and a bug in them fails."""

import ast
import os
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from tilewise import cli


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def new(name):
    return CliRunner().invoke(cli.app, ["new", name])


def commands(outcome):
    """The words of the two printed commands."""
    assert outcome.exit_code == 0, outcome.output
    printed = outcome.output.partition("run next:\n")[2]
    assert all(len(line) <= 120 for line in printed.splitlines())
    verify, pytest_ = (shlex.split(line) for line in printed.replace("\\\n", "").splitlines())
    assert (verify[0], pytest_[0]) == ("tilewise", "pytest")
    return verify, pytest_


def run(words, folder):
    """A printed command, with this Python; whether kernels are interpreted is its own choice."""
    if words[0] == "pytest":
        # Installed, pytest finds the plugin by itself; from a bare checkout it is named.
        installed = any(point.name == "tilewise" for point in entry_points(group="pytest11"))
        words = [*words, "-p", "no:cacheprovider", *([] if installed else ["-p", "tilewise.pytest_plugin"])]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_what_it_writes_passes_the_commands_it_prints_and_a_bug_fails(folder):
    outcome = new("mine.py")
    verify, tests = commands(outcome)
    cases = [case for option, case in pairwise(verify) if option == "--config"]
    kernel, checks = folder / "mine.py", folder / "test_mine.py"
    # The same commands stand in the file, and the tests have the same cases.
    said = ast.get_docstring(ast.parse(kernel.read_text())).partition("\n\n")[2]
    assert [shlex.split(line) for line in said.replace("\\\n", "").splitlines()] == [verify, tests]
    checked = run(verify, folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"PASS: all {3 * len(cases)} checks passed" in checked.stdout
    assert "lse: not returned, not judged" in checked.stdout
    tested = run([*tests, "-v"], folder)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert f"{3 * len(cases)} passed" in tested.stdout
    assert all(f"[{case}-bf16] PASSED" in tested.stdout for case in cases)
    assert "my_attention" not in kernel.read_text() + checks.read_text() + outcome.output

    right = kernel.read_text()
    kernel.write_text(right.replace("seen = (o_n < n_keys)[None, :]", "seen = (o_n >= 0)[None, :]"))
    assert kernel.read_text() != right
    checked = run(verify, folder)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "✗ flash block+1" in checked.stdout


def test_another_folder(folder):
    (folder / "my kernels").mkdir()
    verify, tests = commands(new("my kernels/mine.py"))
    assert (folder / "my kernels" / "mine.py").exists()
    assert verify[:5] == ["tilewise", "verify", "flash", "--impl", "my kernels/mine.py:attention"]
    assert tests == ["pytest", "my kernels/test_mine.py"]


def test_the_kernel_is_small(folder):
    new("mine.py")
    source = (folder / "mine.py").read_text()
    lines = source.splitlines()[ast.parse(source).body[0].end_lineno :]
    assert len([line for line in lines if line.strip() and '"""' not in line]) <= 45


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.txt", "expected a name that ends in .py"),
        ("mine", "expected a name that ends in .py"),
        ("my-kernel.py", "my-kernel is no Python identifier"),
        ("class.py", "class is no Python identifier"),
        ("triton.py", "would hide the module triton"),
        ("nowhere/mine.py", "there is no folder nowhere"),
        ("there.py", "there.py exists already"),
        ("tested.py", "test_tested.py exists already"),
    ],
)
def test_refusals_write_nothing(folder, name, message):
    for file in ("there.py", "test_tested.py"):
        (folder / file).write_text("# mine\n")
    outcome = new(name)
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.output.split())
    assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(
        ("there.py", "test_tested.py"), "# mine\n"
    )
