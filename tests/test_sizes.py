"""Files stay small enough to read."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("src", "packages", "tests", "benchmarks", "examples", "docs")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MOST_LINES = 450


def jitted(source: str) -> list[ast.FunctionDef]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [f for f in functions if any("jit" in ast.unparse(decorator) for decorator in f.decorator_list)]


def test_size():
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}


def test_kernel_names_are_unique_and_open_with_their_plan():
    names = []
    for path in FILES:
        if "src" not in path.relative_to(ROOT).parts:
            continue
        source = path.read_text()
        for kernel in jitted(source):
            if kernel.name.endswith("_kernel"):
                names.append(kernel.name)
                opening = ast.get_source_segment(source, kernel)
                assert all(f"# {word}: " in opening for word in ("Grid", "Owns", "Loops over", "Writes")), kernel.name
    assert names
    assert len(names) == len(set(names))
