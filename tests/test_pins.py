"""The pins of constraints.txt and the ranges of pyproject.toml agree with what published releases of torch require."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tilewise.doctor import MINIMUM

ROOT = Path(__file__).parent.parent
TABLE = tomllib.loads((ROOT / "tests" / "data" / "torch_requires.toml").read_text())["triton"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, Version]:
    """By name, of a file of constraints."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line]
    assert all(str(one.specifier).startswith("==") for one in found)
    return {one.name: Version(str(one.specifier).removeprefix("==")) for one in found}


def ranges() -> dict[str, list[Requirement]]:
    """By name, what the package and its extras require."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    found: dict[str, list[Requirement]] = {}
    for one in map(Requirement, lines):
        found.setdefault(one.name, []).append(one)
    return found


PINS, RANGES = pins((ROOT / "constraints.txt").read_text()), ranges()


def at_least(name: str) -> Version:
    """The lower end of a range."""
    (requirement,) = RANGES[name]
    (lowest,) = [part for part in requirement.specifier if part.operator == ">="]
    return Version(lowest.version)


def contradiction(torch: Version, triton: Version) -> str:
    """Why the two cannot be installed side by side; nothing where they can."""
    if str(torch) not in TABLE:
        return f"nobody has written down what torch {torch} requires"
    wanted = TABLE[str(torch)]
    return "" if triton in SpecifierSet(wanted) else f"torch {torch} requires triton{wanted}, not {triton}"


def test_the_pins_can_be_installed_together():
    assert contradiction(PINS["torch"], PINS["triton"]) == ""


@pytest.mark.parametrize(
    ("torch", "triton", "says"),
    [
        ("2.13.0", "3.9.0", "torch 2.13.0 requires triton==3.7.1, not 3.9.0"),
        ("2.12.0", "3.7.1", "torch 2.12.0 requires triton==3.7.0, not 3.7.1"),
        ("2.14.0", "3.9.0", "torch 2.14.0 requires triton~=3.8.0, not 3.9.0"),
        ("2.99.0", "3.9.0", "nobody has written down what torch 2.99.0 requires"),
    ],
)
def test_pins_that_cannot_are_named(torch, triton, says):
    assert contradiction(Version(torch), Version(triton)) == says


@pytest.mark.parametrize("torch", TABLE)
def test_the_ranges_take_every_published_torch_with_its_triton(torch):
    (needs_torch,), (needs_triton,) = RANGES["torch"], RANGES["triton"]
    assert Version(torch) in needs_torch.specifier
    # The one release that is required, or the first of those that are.
    (wanted,) = SpecifierSet(TABLE[torch])
    assert Version(wanted.version) in needs_triton.specifier


def test_the_ranges_begin_with_a_published_torch_and_its_triton():
    """Nothing older is promised than what is written down, and so tried."""
    oldest = min(TABLE, key=Version)
    assert Version(oldest) == at_least("torch")
    assert at_least("triton") in SpecifierSet(TABLE[oldest])


@pytest.mark.parametrize("name", PINS)
def test_a_pin_lies_in_the_range(name):
    # mkdocs and mkdocstrings come with their own plugins, which the package names instead.
    assert name in RANGES or name in ("mkdocs", "mkdocstrings")
    assert all(PINS[name] in requirement.specifier for requirement in RANGES.get(name, []))


def test_triton_is_required_on_linux_alone():
    (requirement,) = RANGES["triton"]
    assert requirement.marker.evaluate({"platform_system": "Linux"})
    assert not requirement.marker.evaluate({"platform_system": "Darwin"})
    assert not requirement.marker.evaluate({"platform_system": "Windows"})
    (requirement,) = RANGES["torch"]
    assert requirement.marker is None


def test_doctor_asks_for_what_the_package_requires():
    asked = {name: Version(".".join(map(str, numbers))) for name, numbers in MINIMUM.items()}
    assert asked == {name: at_least(name) for name in ("torch", "triton")}


def tried(name: str) -> list[Version]:
    """What the Makefile lists, the oldest first."""
    (line,) = re.findall(rf"(?m)^{name} := (.*)$", (ROOT / "Makefile").read_text())
    return sorted(map(Version, line.split()))


def test_make_tries_the_oldest_transformers():
    assert tried("TRANSFORMERS")[0] == at_least("transformers")


def test_make_tries_the_oldest_and_the_newest_triton():
    releases = tried("TRITONS")
    assert releases[0] == at_least("triton")
    assert releases[-1] >= max(Version(next(iter(SpecifierSet(wanted))).version) for wanted in TABLE.values())
    assert releases[0] < PINS["triton"] < releases[-1]
