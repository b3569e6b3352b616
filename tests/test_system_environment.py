"""`make verify SYSTEM=1` keeps the torch and triton that a machine has, and installs what else is missing."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "system_environment.py"
PROJECTS = [
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in (".", "packages/mytorch")
]
PROJECT = PROJECTS[0]
PINS = (ROOT / "constraints.txt").read_text()
TORCH, TRITON = "2.11.0+odd.7", "3.6.5"
REQUIRED_BY_TORCH = ["filelock", f"triton=={TRITON}; platform_system == 'Linux'"]


def load():
    spec = importlib.util.spec_from_file_location("system_environment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load()


def add_stub(site: Path, module: str, version: str, name: str = "", requires: tuple[str, ...] = ()) -> None:
    """A distribution with nothing in it."""
    (site / module).mkdir(parents=True)
    (site / module / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = site / f"{name.replace('-', '_') or module}-{version}.dist-info"
    metadata.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name or module}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    (metadata / "METADATA").write_text("\n".join(lines) + "\n")
    (metadata / "RECORD").write_text("")


@pytest.fixture
def site(tmp_path):
    """What a machine has, in a folder of its own: a torch and a triton of versions that nobody pins."""
    add_stub(tmp_path / "system", "torch", TORCH, requires=tuple(REQUIRED_BY_TORCH))
    add_stub(tmp_path / "system", "triton", TRITON)
    return tmp_path / "system"


def found_in(site: Path) -> dict:
    """What the script finds where `site` comes first."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    said = subprocess.check_output([sys.executable, SCRIPT, "--look"], env=environment)
    return {module: tool.Found(*one) for module, one in json.loads(said).items()}


def pip_would_install(site: Path, requirements: list[str], constraints: list[str], folder: Path) -> set[str]:
    """Names of what pip would install in addition to what is there, whether or not it can be found."""
    wanted, pins = folder / "requirements.txt", folder / "constraints.txt"
    wanted.write_text("\n".join(requirements))
    pins.write_text("\n".join(constraints))
    # What is there must do: neither an index nor a folder of packages is looked into, whatever pip is set up for here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment |= {"PYTHONPATH": str(site), "PIP_CONFIG_FILE": os.devnull}
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
    words = [*pip, "--requirement", wanted, "--constraint", pins]
    result = subprocess.run(words, capture_output=True, text=True, env=environment)
    if result.returncode:
        refused = re.findall(r"(?:No matching distribution found for|Cannot install) ([\w-]+)", result.stderr)
        return set(refused) or {result.stderr}
    return {one["metadata"]["name"] for one in json.loads(result.stdout)["install"]}


def of_the_two(lines: list[str]) -> list[str]:
    return [line for line in lines if tool.name_of(line) in tool.KEPT]


@pytest.mark.slow
def test_pip_touches_neither(site, tmp_path):
    found = found_in(site)
    assert {module: one.version for module, one in found.items()} == {"torch": TORCH, "triton": TRITON}
    requirements = tool.requirements(PROJECTS, found, REQUIRED_BY_TORCH)
    assert pip_would_install(site, requirements, tool.constraints(PINS, found), tmp_path) == set()
    # Even where another package asks for them.
    assert pip_would_install(site, ["torch", "triton>=3.6"], tool.constraints(PINS, found), tmp_path) == set()
    # Our own pins would replace them.
    assert pip_would_install(site, ["torch"], PINS.splitlines(), tmp_path) == {"torch"}
    assert pip_would_install(site, ["triton"], PINS.splitlines(), tmp_path) == {"triton"}


def test_what_pip_is_asked_for_is_the_rest(site):
    requirements = tool.requirements(PROJECTS, found_in(site), REQUIRED_BY_TORCH)
    names = {tool.name_of(line) for line in requirements}
    assert not names & {"torch", "triton", "tilewise", "tilewise-mytorch", "filelock"}
    assert {"numpy", "rich", "typer", "numba", "safetensors", "mkdocs-material", "pytest", "ruff"} <= names
    assert len(requirements) == len(set(requirements))


def test_the_pins_are_those_of_what_is_there(site):
    constraints = tool.constraints(PINS, found_in(site))
    assert of_the_two(constraints) == [f"torch=={TORCH}", f"triton=={TRITON}"]
    others = [line for line in PINS.splitlines() if "==" in line and tool.name_of(line) not in tool.KEPT]
    assert [line for line in constraints if line in others] == others


def test_what_is_missing_is_said_and_installed_to_fit_the_other(site, capsys):
    found = found_in(site)
    only_torch, only_triton = ({name: found[name]} for name in ("torch", "triton"))
    tool.say(only_torch)
    assert capsys.readouterr().out == f"torch {TORCH} is kept: {site}\ntriton is missing: it is installed\n"
    # The range is the package's, the release the one that this torch requires; our pins stay out of it.
    our_torch, our_triton = of_the_two(PROJECT["dependencies"])
    assert of_the_two(tool.requirements(PROJECTS, only_torch, REQUIRED_BY_TORCH)) == [our_triton, REQUIRED_BY_TORCH[1]]
    assert of_the_two(tool.constraints(PINS, only_torch)) == [f"torch=={TORCH}"]
    assert of_the_two(tool.requirements(PROJECTS, only_triton, [])) == [our_torch]
    assert of_the_two(tool.constraints(PINS, only_triton)) == [f"triton=={TRITON}"]


def test_where_there_is_neither_both_are_the_pinned_ones(capsys):
    tool.say({})
    assert capsys.readouterr().out == "torch is missing: it is installed\ntriton is missing: it is installed\n"
    assert {"torch", "triton"} <= {tool.name_of(line) for line in tool.requirements(PROJECTS, {}, [])}
    assert [line for line in PINS.splitlines() if tool.name_of(line)] == tool.constraints(PINS, {})


def test_a_triton_under_another_name_is_kept(tmp_path):
    add_stub(tmp_path, "triton", "3.6.0+gitabc", name="pytorch-triton")
    found = found_in(tmp_path)
    assert found["triton"][:2] == ("pytorch-triton", "3.6.0+gitabc")
    assert "triton" not in {tool.name_of(line) for line in tool.requirements(PROJECTS, found, [])}
    assert "pytorch-triton==3.6.0+gitabc" in tool.constraints(PINS, found)


@pytest.mark.parametrize(
    ("torch", "triton", "says"),
    [
        ("2.9.1+cu130", "3.6.0", ["torch 2.9.1+cu130 is there, and the package needs 2.10 or newer"]),
        ("2.10.0a0+34c6371.nv25", "3.6.0+git", []),
        ("2.13.0", "3.5.1", ["triton 3.5.1 is there, and the package needs 3.6 or newer"]),
        ("3.0.0", tool.UNKNOWN, []),
    ],
)
def test_what_is_too_old_is_named(torch, triton, says):
    found = {"torch": tool.Found("torch", torch, "", ""), "triton": tool.Found("triton", triton, "", "")}
    assert tool.too_old(PROJECT["dependencies"], found) == says


@pytest.fixture
def made(site, tmp_path, monkeypatch):
    """Makes an environment with what `site` has; what it calls pip with is collected, and `pip` called instead."""
    found, run, called = found_in(site), tool.run, []

    def make(pip):
        def instead(*words):
            if "pip" in words:
                called.append(words)
                pip(tmp_path / "made")
                return ""
            # pip's own installation takes longer than all the rest.
            return run(*words, *(["--without-pip"] if "venv" in words else []))

        monkeypatch.setattr(tool, "run", instead)
        monkeypatch.setattr(tool, "look", lambda: found)
        monkeypatch.setattr(tool.importlib.metadata, "requires", lambda name: REQUIRED_BY_TORCH)
        tool.make(tmp_path / "made")
        return called

    return make


def test_the_environment_has_what_was_there(made, site, tmp_path):
    """Though it is made by an interpreter of an environment, whose packages it does not see by itself."""
    first, second = made(lambda folder: None)
    assert tool.seen_by(tmp_path / "made" / "bin" / "python") == found_in(site)
    for option, name in (("--constraint", "constraints.txt"), ("--requirement", "requirements.txt")):
        assert first[first.index(option) + 1] == str(tmp_path / "made" / name)
    assert "\ntorch" not in (tmp_path / "made" / "requirements.txt").read_text()
    assert second[-5:] == ("--no-deps", "--editable", ".", "--editable", "packages/mytorch")


def test_another_torch_in_the_environment_is_an_error(made):
    def pip(folder):
        (place,) = (folder / "lib").glob("python*/site-packages")
        if not (place / "torch").exists():
            add_stub(place, "torch", "2.13.0")

    with pytest.raises(SystemExit, match=r"another torch than was found: .*2\.13\.0"):
        made(pip)


def commands(*words: str) -> str:
    """What make would do on a fresh checkout."""
    return subprocess.check_output(["make", "--dry-run", "--always-make", *words], cwd=ROOT, text=True)


@pytest.mark.parametrize("target", ["verify", "test"])
def test_make_keeps_the_two_environments_apart(target):
    ours = commands(target, "SYSTEM=", "PYTHON=python3")
    system = commands(target, "SYSTEM=1", "PYTHON=/opt/torch/bin/python")
    assert ".venv-system" not in ours
    assert "--constraint constraints.txt" in ours
    assert "/opt/torch/bin/python tools/system_environment.py .venv-system" in system
    assert ".venv/" not in system
    assert "constraints.txt" not in system
    assert commands(target, "SYSTEM=0", "PYTHON=python3") == ours
