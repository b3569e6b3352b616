"""Makes an environment on top of the torch and triton that a machine has already: `make verify SYSTEM=1` calls it.

`system_environment.py FOLDER`, run by the interpreter that has them. Neither is installed, replaced or hidden: pip is
not asked for what is there, and our pins of the two give way to it. What else the project needs goes into FOLDER, as
far as it is missing. Only the standard library is imported.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# What is installed from its folder: tilewise, whose extra `dev` counts too, and mytorch.
FOLDERS = (".", "packages/mytorch")
# What is kept, with the names under which it is distributed: nightly builds and containers have others for Triton.
KEPT = {"torch": ("torch",), "triton": ("triton", "pytorch-triton", "triton-nightly")}
UNKNOWN = "of unknown version"


class Found(NamedTuple):
    """A package that is there: its distribution's name and version, and the folders of its modules and its metadata."""

    name: str
    version: str
    modules: str
    metadata: str


def name_of(line: str) -> str:
    """The package that a line of requirements or constraints is about; nothing for a comment."""
    name = re.match(r"[\w.-]+", line)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""


def look() -> dict[str, Found]:
    """What this interpreter finds of torch and triton, without importing either."""
    found = {}
    for module, names in KEPT.items():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            continue
        modules = str(Path(spec.origin).resolve().parent.parent)
        listed = []
        for name in names:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                one = importlib.metadata.distribution(name)
                listed.append(Found(name, one.version, modules, str(Path(str(one.locate_file(""))).resolve())))
        # Where several are there, the one whose modules are imported is listed beside them.
        listed.sort(key=lambda one: one.metadata != modules)
        found[module] = listed[0] if listed else Found(module, UNKNOWN, modules, modules)
    return found


def say(found: dict[str, Found]) -> None:
    """What there is, and what becomes of it."""
    for module in KEPT:
        one = found.get(module)
        kept = f"{module} {one.version} is kept: {one.modules}" if one else f"{module} is missing: it is installed"
        # At once: what pip says comes after it.
        print(kept, flush=True)


def too_old(dependencies: Iterable[str], found: dict[str, Found]) -> list[str]:
    """Of what is there, what the package does not run with. Previews count as the release that they precede."""

    def release(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text)[:2]]

    lowest = {name_of(line): re.findall(r">=([\d.]+)", line) for line in dependencies}
    return [
        f"{module} {one.version} is there, and the package needs {lowest[module][0]} or newer"
        for module, one in found.items()
        if one.version != UNKNOWN and release(one.version) < release(lowest[module][0])
    ]


def requirements(
    projects: list[dict[str, Any]], found: dict[str, Found], required_by_torch: Iterable[str]
) -> list[str]:
    """What pip is asked for: what the packages and their extras `dev` require, but for what is there."""
    extras = {project["name"]: project.get("optional-dependencies", {}) for project in projects}
    lines = [line for project in projects for line in project["dependencies"]]
    lines += [line for of_one in extras.values() for line in of_one.get("dev", ())]
    wanted: list[str] = []
    while lines:
        line = lines.pop(0)
        if name_of(line) in extras:
            # Extras of its own: tilewise[tools,docs].
            named = re.findall(r"\w+", line.partition("[")[2])
            lines += [more for extra in named for more in extras[name_of(line)][extra]]
        elif name_of(line) not in found and line not in wanted:
            wanted.append(line)
    # pip is not asked for a torch that is there, and so does not see which Triton it requires.
    return wanted + [line for line in required_by_torch if name_of(line) in KEPT and name_of(line) not in found]


def constraints(text: str, found: dict[str, Found]) -> list[str]:
    """The pins; of torch and triton, where there is either, not ours but what is there."""
    lines = [line for line in text.splitlines() if name_of(line) and (not found or name_of(line) not in KEPT)]
    return lines + [f"{one.name}=={one.version}" for one in found.values() if one.version != UNKNOWN]


def add_folders(site: Path, found: dict[str, Found]) -> None:
    """Let the environment whose packages are in `site` see what was found.

    One that is made by an interpreter of another environment does not see that one's packages, but those of the
    interpreter below both. A file that is read when it starts adds the folders, and what such files in them add. Its
    name comes behind that of an editable install, so that this checkout is imported and no other.
    """
    folders = dict.fromkeys(folder for one in found.values() for folder in (one.modules, one.metadata))
    text = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)
    (site / "system-packages.pth").write_text(text, encoding="utf-8")


def run(*words: str) -> str:
    """What a command prints; where it fails, this one ends too."""
    result = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if result.returncode:
        sys.exit(f"{' '.join(words)} failed, with code {result.returncode}\n{result.stdout}")
    return result.stdout


def make_folder(folder: Path, found: dict[str, Found]) -> Path:
    """A fresh environment that sees what was found; returns its interpreter."""
    run(sys.executable, "-m", "venv", "--system-site-packages", "--clear", str(folder))
    python = folder / "bin" / "python"
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    add_folders(Path(site), found)
    return python


def seen_by(python: Path) -> dict[str, Found]:
    """What another interpreter finds."""
    answer = json.loads(run(str(python), __file__, "--look"))
    return {module: Found(*one) for module, one in answer.items()}


def make(folder: Path) -> None:
    """The environment, with all that the packages and their tests need."""
    # The machine's interpreter, not one that pip has let pass.
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"Python {sys.version.split()[0]} is too old: give one of 3.11 or newer, make SYSTEM=1 PYTHON=...")
    import tomllib

    texts = [(ROOT / place / "pyproject.toml").read_text(encoding="utf-8") for place in FOLDERS]
    projects = [tomllib.loads(text)["project"] for text in texts]
    found = look()
    say(found)
    for line in too_old(projects[0]["dependencies"], found):
        sys.exit(line)
    python = make_folder(folder, found)
    listed = "torch" in found and found["torch"].version != UNKNOWN
    required_by_torch = (importlib.metadata.requires("torch") or []) if listed else []
    wanted = requirements(projects, found, required_by_torch)
    pins = constraints((ROOT / "constraints.txt").read_text(encoding="utf-8"), found)
    for name, lines in (("requirements.txt", wanted), ("constraints.txt", pins)):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = (str(python), "-m", "pip", "install", "--quiet")
    run(*pip, "--constraint", str(folder / "constraints.txt"), "--requirement", str(folder / "requirements.txt"))
    run(*pip, "--no-deps", *(word for place in FOLDERS for word in ("--editable", place)))
    now = seen_by(python)
    for module, one in found.items():
        if now.get(module) != one:
            sys.exit(f"the environment has another {module} than was found: {now.get(module)}, not {one}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--look"]:
        print(json.dumps(look()))
    elif len(sys.argv) == 2:
        make(Path(sys.argv[1]).absolute())
    else:
        sys.exit(__doc__)
