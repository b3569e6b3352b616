"""Where the workbench changes torch, Triton or the operators for a whole process, and why no other call sees it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tilewise"
FOREIGN = ("torch", "triton", "tilewise.ops")
OWN_PROCESS = "runs in a process of its own, which does nothing else"
ASKS = "what takes the place of a function asks whose call it is, and passes on those of other threads"
ALLOWED = {
    "_assignments.py": "a syntax tree of its own",
    "_gluon/translate.py": "fields of its own classes",
    "_gluon/values.py": "operators of its own class",
    "interpreter.py": "only where a process interprets kernels: tests/test_repair.py",
    "_interpreter_speed.py": "part of that",
    "trace/record.py": ASKS,
    "verify/state.py": "puts back what an implementation has changed of torch's",
    "verify/watch.py": ASKS,
    "_warmup_worker.py": OWN_PROCESS,
    "inspect/audit.py": OWN_PROCESS,
    "inspect/audit_worker.py": OWN_PROCESS,
    "inspect/compile.py": OWN_PROCESS,
    "inspect/launches.py": OWN_PROCESS,
    "verify/worker.py": "a name in sys.modules, while a process starts: it decides nothing that is computed",
    "verify/implementation.py": "the module that --impl names, added to sys.modules as an import would",
}


def is_foreign(module: str | None) -> bool:
    return module is not None and any(module == root or module.startswith(root + ".") for root in FOREIGN)


def changes(source: str) -> list[str]:
    """Assignments to attributes of what comes from torch, Triton or the operators; patches by any other means."""
    tree, imported, found = ast.parse(source), {"sys"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names if is_foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_foreign(node.module):
            imported |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        targets = {ast.Assign: "targets", ast.Delete: "targets", ast.AugAssign: "target", ast.AnnAssign: "target"}
        if type(node) in targets:
            given = getattr(node, targets[type(node)])
            written = [part for target in (given if isinstance(given, list) else [given]) for part in parts(target)]
            found += [ast.unparse(target) for target in written if root(target) in imported]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("setattr", "delattr", "mock"):
            found.append(ast.unparse(node))
    return found


def parts(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def root(target: ast.expr) -> str | None:
    """The name at the start of `name.attribute` or `name.attribute[...]`; None for a plain name."""
    if isinstance(target, ast.Name):
        return None
    while isinstance(target, ast.Attribute | ast.Subscript):
        target = target.value
    return target.id if isinstance(target, ast.Name) else None


def test_all_of_them_are_known():
    files = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "ops"]
    found = {str(path.relative_to(SOURCE)) for path in files if changes(path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        "from tilewise.ops.nsa.selected import index\nindex.chunks = None",
        "from tilewise.ops._host import backend\ndef f():\n    backend._INTERPRETING = False",
        "import torch\ntorch.empty, x = 1, 2",
        "import torch\nsetattr(torch, name, 1)",
        "from unittest import mock\nwith mock.patch.object(torch, 'empty'): pass",
        "import sys\nsys.modules['__main__'] = None",
        "import triton.runtime\ntriton.runtime.driver._active += 1",
    ],
)
def test_they_are_found(source):
    assert changes(source)


def test_what_is_no_change_is_not_found():
    assert not changes("import torch\nx = torch.empty(3)\nx.grad = None\nself.torch = torch\ny: int = 1")
