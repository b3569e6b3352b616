"""What the forge, pre-commit and make read: it parses, names what there is, and publishes nothing."""

import re
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="the documentation's tools are not installed")

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [
    *WORKFLOWS,
    *sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
]


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_parses(path):
    assert isinstance(load(path), dict)


def test_every_workflow_is_there():
    assert [path.stem for path in WORKFLOWS] == ["check", "docs", "gpu", "nightly", "release"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_only_and_calls_what_there_is(path):
    workflow, makefile = load(path), (ROOT / "Makefile").read_text()
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in path.read_text()
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands
    for target in re.findall(r"(?m)^make (\S+)", "\n".join(commands)):
        assert re.search(rf"(?m)^{target}:", makefile), target
    assert not re.search(r"twine|publish|upload", "\n".join(commands))
    # Actions of the forge itself alone, by release.
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"actions/(checkout|setup-python|upload-artifact)@v\d+", name) for name in used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_pull_requests_never_reach_a_runner_of_our_own(path):
    workflow = load(path)
    own = any("self-hosted" in job["runs-on"] for job in workflow["jobs"].values())
    assert own == (path.stem == "gpu")
    # YAML takes the key `on` for a truth value.
    assert not (own and "pull_request" in workflow[True])


def test_pre_commit_runs_anywhere_with_the_pinned_ruff():
    hooks = {
        hook["id"]: (repo, hook) for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    }
    assert hooks.keys() == {"ruff-check", "ruff-format", "mypy"}
    (pin,) = re.findall(r"(?m)^ruff==(\S+)$", (ROOT / "constraints.txt").read_text())
    assert hooks["ruff-check"][0] is hooks["ruff-format"][0]
    assert hooks["ruff-check"][0]["rev"] == f"v{pin}"
    assert hooks["mypy"][1]["entry"] == "python -m mypy"


def test_a_bug_report_asks_for_doctors_report():
    asked = {field["id"]: field for field in load(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert "tilewise doctor --report" in asked["report"]["attributes"]["description"]
    assert asked["report"]["validations"]["required"]


@pytest.mark.parametrize(
    ("target", "expression"),
    [
        ("test", "not slow and not nightly"),
        ("test-slow", "slow and not nightly"),
        ("test-all", "not nightly"),
        ("test-nightly", None),
    ],
)
def test_the_tiers_of_tests(target, expression):
    said = subprocess.check_output(["make", "--dry-run", target, "SYSTEM=0"], cwd=ROOT, text=True)
    (command,) = [line for line in said.splitlines() if "-m pytest" in line]
    found = re.search(r'pytest .*-m "([^"]*)"', command)
    assert (found[1] if found else None) == expression
