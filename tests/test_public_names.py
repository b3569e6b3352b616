"""Every public name is imported and called, and every command still has its options: public_names.py lists them."""

import importlib
import inspect
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import public_names
import pytest
import torch
import typer
from public_calls import CALLS, public
from typer.testing import CliRunner

NAMES = (*public_names.PARAMETERS, *public_names.OTHERS)


def test_every_name_has_a_call():
    assert set(CALLS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_imported(name):
    assert public(name) is not None


@pytest.mark.parametrize("function", dict.fromkeys(CALLS.values()), ids=lambda function: function.__name__)
def test_it_is_called(function, tmp_path):
    (name, *_) = (name for name, called in CALLS.items() if called is function)
    with torch.no_grad():
        function(public(name), *([tmp_path] if "tmp_path" in inspect.signature(function).parameters else []))


@pytest.mark.parametrize("name", public_names.PARAMETERS)
def test_parameters_stay_and_new_ones_have_defaults(name):
    expected, _, named = public_names.PARAMETERS[name].partition("*")
    parameters = inspect.signature(public(name)).parameters
    by_position = [key for key, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    listed = {*expected.split(), *named.split()}
    assert by_position[: len(expected.split())] == expected.split()
    assert listed <= set(parameters)
    without = {key for key, p in parameters.items() if p.default is p.empty and p.kind not in (2, 4)}
    assert without <= listed


@pytest.mark.parametrize("name", public_names.MEMBERS)
def test_members_stay(name):
    found = public(name)
    there = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
    assert set(public_names.MEMBERS[name].split()) <= there


@pytest.mark.parametrize("command", public_names.OPTIONS)
def test_a_command_keeps_its_options(command):
    from tilewise import cli

    found = typer.main.get_command(cli.app).commands[command]
    options = {option for parameter in found.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(public_names.OPTIONS[command].split()) <= options


@pytest.mark.parametrize("words", public_names.COMMANDS)
def test_a_command_runs(words, tmp_path, monkeypatch):
    from tilewise import cli

    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(cli.app, words.split())
    assert outcome.exit_code == 0, outcome.output


def test_the_module_is_the_command():
    outcome = subprocess.run([sys.executable, "-m", "tilewise", "--help"], capture_output=True, text=True)
    assert outcome.returncode == 0
    assert all(command in outcome.stdout for command in public_names.OPTIONS)


def test_the_script_and_the_plugin_are_declared():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"tilewise": "tilewise.cli:main"}
    assert project["entry-points"]["pytest11"] == {"tilewise": "tilewise.pytest_plugin"}
    for point in entry_points(group="pytest11", name="tilewise"):
        assert point.value == "tilewise.pytest_plugin"


def test_the_plugin_has_its_marker_its_fixture_and_its_setting(pytestconfig):
    plugin = importlib.import_module("tilewise.pytest_plugin")
    settings = {}

    class Parser:
        def addini(self, name, help, type, default):
            settings[name] = (type, default)

    plugin.pytest_addoption(Parser())
    assert settings == {"tilewise_interpret": ("bool", False)}
    assert plugin.MARKER.startswith("tilewise(operator, *, configs=(), dtypes=('fp32', 'fp16', 'bf16')")
    assert any(line.startswith("tilewise(operator") for line in pytestconfig.getini("markers"))


@pytest.mark.tilewise("flash", configs=["T=5,H=1,D=4"], dtypes=["fp32"], gradients=False, seed=1)
def test_the_fixture_checks_an_implementation(tilewise_check):
    from tilewise import flash_attention

    tilewise_check(lambda **arguments: flash_attention(**arguments, backend="reference"))
    with pytest.raises(pytest.fail.Exception, match="wrong values"):
        tilewise_check(lambda **arguments: tuple(map(torch.zeros_like, flash_attention(**arguments))))
