"""tilewise and mytorch are two distributions: each installs its own package, and neither requires the other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mytorch
import tilewise

ROOT = Path(__file__).parent.parent
FOLDERS = {"tilewise": ROOT, "mytorch": ROOT / "packages" / "mytorch"}
PROJECTS = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in FOLDERS.items()}
setuptools = pytest.importorskip("setuptools", reason="setuptools is not installed")


def packages(name: str, source: Path) -> set[str]:
    """What setuptools would take from a folder of sources, as it does for a wheel."""
    table = PROJECTS[name]["tool"]["setuptools"]["packages"]["find"]
    assert table.keys() == {"where", "include"}
    return set(setuptools.find_namespace_packages(str(source), include=table["include"]))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_has_its_own_package_alone(name, tmp_path):
    assert PROJECTS[name]["tool"]["setuptools"]["packages"]["find"]["where"] == ["src"]
    found = packages(name, FOLDERS[name] / "src")
    assert {package.partition(".")[0] for package in found} == {name}
    assert {f"{name}.nn", f"{name}.ops"} <= found
    # Nor what an older checkout left behind: compiled files of the other.
    for other in FOLDERS:
        (tmp_path / other / "__pycache__").mkdir(parents=True)
    assert {package.partition(".")[0] for package in packages(name, tmp_path)} == {name}


@pytest.mark.parametrize("name", FOLDERS)
def test_no_requirement_names_an_unpublished_distribution(name):
    """Anybody could register the name. tilewise's extras may name tilewise, which is installed at the same time."""
    project = PROJECTS[name]["project"]
    extras = project.get("optional-dependencies", {})
    required = {Requirement(line).name for lines in (project["dependencies"], *extras.values()) for line in lines}
    assert "mytorch" not in extras
    assert not {one for one in required if "mytorch" in one}
    assert name == "tilewise" or "tilewise" not in required


@pytest.mark.parametrize("name", FOLDERS)
def test_a_package_says_its_version_and_that_it_is_typed(name):
    """The version stands in the package alone, where it is read without an install; pyproject takes it from there."""
    tools = PROJECTS[name]["tool"]["setuptools"]
    assert PROJECTS[name]["project"]["dynamic"] == ["version"]
    assert tools["dynamic"]["version"] == {"attr": f"{name}.__version__"}
    # A plain text: setuptools reads it and imports nothing.
    assert re.findall(r'(?m)^__version__ = "(.*)"$', (FOLDERS[name] / "src" / name / "__init__.py").read_text())
    assert "py.typed" in tools["package-data"][name]
    assert (FOLDERS[name] / "src" / name / "py.typed").exists()


def test_both_are_released_together():
    assert mytorch.__version__ == tilewise.__version__


def test_make_installs_what_a_command_needs():
    """`verify` and `bench` the package with its tools; everything else, the framework and development's tools too."""
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"(?m)^\t.* pip install .*constraints\.txt --editable .*$", makefile)
    assert [command.partition("--editable ")[2] for command in commands] == [
        "'.[tools]'",
        "'.[dev]' --editable packages/mytorch",
    ]
    (projects,) = re.findall(r"(?m)^PROJECTS := (.*)$", makefile)
    assert [(ROOT / path).exists() for path in projects.split()] == [True, True]
    for rule in (
        ".venv/.tools: pyproject.toml constraints.txt",
        ".venv/.ready: .venv/.tools $(PROJECTS)",
        ".venv-system/.ready: $(PROJECTS) constraints.txt",
        "verify: $(TOOLS)",
        "bench: $(TOOLS)",
    ):
        assert f"\n{rule}" in makefile


def test_folders_are_enough_where_nothing_is_installed(tmp_path):
    """From another folder, with an absolute PYTHONPATH."""
    path = os.pathsep.join(str(folder / "src") for folder in FOLDERS.values())
    code = "import mytorch, tilewise; print(tilewise.__file__, mytorch.__file__)"
    words = [sys.executable, "-c", code]
    said = subprocess.check_output(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, text=True).split()
    assert said == [str(folder / "src" / name / "__init__.py") for name, folder in FOLDERS.items()]
