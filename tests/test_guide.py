"""CONTRIBUTING's example of a new operator: built from its code blocks alone in a copy of the package, then every
command is run on it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = re.compile(r"^`(\S+)`:\n\n```python\n(.*?)^```$", re.M | re.S)
LINES = re.compile(r"^```diff\n--- (\S+)\n (.*?)\n((?:\+.*\n)+)```$", re.M)
NO_GPU = pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="said of a machine without a GPU")


@pytest.fixture(scope="session")
def guide():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text[text.index("## Adding an operator\n") : text.index("## Deprecation\n")]


@pytest.fixture(scope="session")
def built(guide, tmp_path_factory):
    """Copies of src and docs/api with the operator in them."""
    root = tmp_path_factory.mktemp("guide")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "docs" / "api", root / "docs" / "api")
    for name, source in FILE.findall(guide):
        assert not (root / name).exists(), name
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source, encoding="utf-8")
    for name, above, added in LINES.findall(guide):
        text = (root / name).read_text(encoding="utf-8")
        assert text.count(above + "\n") == 1, (name, above)
        more = "".join(line[1:] + "\n" for line in added.splitlines())
        (root / name).write_text(text.replace(above + "\n", f"{above}\n{more}"), encoding="utf-8")
    return root


def run(built, *words, **environment):
    """Its exit code and all that it said, in a line."""
    paths = os.pathsep.join(map(str, (built / "src", ROOT / "tests", *sys.path)))
    result = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=built,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_it_touches_ten_files_at_most(guide):
    touched = {name for name, *_ in FILE.findall(guide)} | {name for name, *_ in LINES.findall(guide)}
    assert len(touched) <= 10
    assert guide.count("```python") == len(FILE.findall(guide))
    assert guide.count("```diff") == len(LINES.findall(guide))


def test_it_is_as_this_project_is(built):
    """Linted, formatted, and with its place on the API page."""
    new = [str(built / name) for name in ("src/tilewise/ops/swiglu", "src/tilewise/workbench/swiglu.py", "tests")]
    for command in (("check",), ("format", "--check")):
        code, said = run(built, "ruff", *command, "--config", str(ROOT / "pyproject.toml"), *new)
        assert code == 0, said
    assert "::: tilewise.swiglu\n" in (built / "docs" / "api" / "tilewise.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("verify swiglu --config small --config odd-sizes --config no-tokens", 0, "PASS: all 18 checks passed"),
        ("verify swiglu --every-config", 2, "there are no tile configurations of 'swiglu': its one tile follows from"),
        ("sanity swiglu", 2, "there are no tile configurations of 'swiglu': its one tile follows from"),
        ("verify swiglu --list", 0, "15 planted bugs: rows-lost"),
        ("trace swiglu --out out --html page.html", 0, "✓ swiglu_fwd_kernel, program 0, 32 rows: 5 values in 1 steps"),
        ("trace swiglu --program 1 --seq-blocks 3 --dtype fp32 --out out", 0, "program 1, 32 rows"),
        ("trace swiglu --block-m 16 --out out", 2, "--block-m means nothing to swiglu"),
        ("bench swiglu --list", 0, "baseline eager"),
        ("inspect swiglu --audit", 2, "there is no audit of 'swiglu': its offsets are one product of 64 bits"),
        ("inspect swiglu --config 0 --arch sm_90", 2, "there are no tile configurations of 'swiglu'"),
    ],
)
@NO_GPU
def test_every_command_answers(built, words, code, said):
    assert (code, True) == ((found := run(built, "tilewise", *words.split()))[0], said in found[1]), found


@pytest.mark.slow
@NO_GPU
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify swiglu", "PASS: all"),
        pytest.param(
            *("verify swiglu --mutants --config small --config odd-sizes --dtype fp32", "bugs: 15 of 15 caught"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(*("verify swiglu --search 5 --config small --dtype fp32", "PASS"), marks=pytest.mark.nightly),
        pytest.param(
            *("bench swiglu --config tokens-256 --iterations 2 --html page.html", "eager"), marks=pytest.mark.nightly
        ),
        ("inspect swiglu --arch sm_90", "swiglu_bwd"),
        ("warmup swiglu --arch sm_90 --shapes small", "2 kernels compiled"),
    ],
)
def test_every_command_runs(built, words, said, tmp_path):
    code, found = run(built, "tilewise", *words.split(), TRITON_CACHE_DIR=str(tmp_path))
    assert code == 0, found
    assert said in found


@pytest.mark.slow
def test_it_can_be_explained(built):
    code = (
        "import torch, tilewise; x = torch.empty(2, 64, 32, device='meta', requires_grad=True);"
        "print(tilewise.explain(tilewise.swiglu, x, x))"
    )
    (built / "explain_it.py").write_text(code)
    assert all(name in run(built, "explain_it")[1] for name in ("swiglu_fwd_kernel", "swiglu_bwd_kernel"))


@pytest.mark.slow
def test_its_own_tests_pass_and_so_do_those_of_every_operator(built):
    """The registry's tests take a new operator as they find it."""
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow", "-c", str(ROOT / "pyproject.toml"))
    everywhere = [
        str(ROOT / "tests" / f"{name}.py")
        for name in ("ops/test_cases", "verify/test_plan", "verify/test_problem", "verify/test_mutants")
    ]
    for words in ((str(built / "tests" / "ops" / "swiglu"),), (*everywhere, "-k", "swiglu")):
        code, said = run(built, "pytest", *options, *words)
        assert code == 0, said
        assert "passed" in said
