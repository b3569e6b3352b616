"""Who may import whom."""

import ast
import graphlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "tilewise"
MYTORCH = SOURCE.parents[1] / "packages" / "mytorch" / "src" / "mytorch"
WORKBENCH = (
    "tilewise.verify",
    "tilewise.trace",
    "tilewise.bench",
    "tilewise.inspect",
    "tilewise.report",
    "tilewise.cli",
    "tilewise.workbench",
    "tilewise.doctor",
    "tilewise.new",
)
OPS_MAY = ("torch", "triton", "tilewise")


def imports(source: str) -> set[str]:
    """Every module that a file imports, wherever in it; `from a import b` counts as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def under(module: str, *roots: str) -> bool:
    return any(module == root or module.startswith(root + ".") for root in roots)


def last(module: str, *names: str) -> bool:
    return any(part.startswith(names) for part in module.split("."))


def is_device_code(path: Path) -> bool:
    """Whether a file of tilewise holds device code alone, by its place."""
    hopper = path.parent.name == "hopper" and path.stem in ("fwd", "bwd", "sum")
    return path.stem.startswith("kernels") or "kernels" in path.parts or "_device" in path.parts or hopper


def violations(path: Path, source: str) -> list[str]:
    """What the file at `path` (relative to the package) imports and must not."""
    modules = imports(source)
    # A distribution of its own, which tilewise must not need.
    bad = {m for m in modules if under(m, "mytorch")}
    if is_device_code(path):
        bad |= {m for m in modules if not under(m, "triton", "typing", "tilewise.ops._device")}
    if path.name in ("reference.py", "simulate.py"):
        bad |= {
            m
            for m in modules
            if under(m, "triton") or (under(m, "tilewise") and last(m, "kernels", "launch", "_device", "cpu", "api"))
        }
    if path.parts[0] == "ops" and path.name.startswith("launch"):
        bad |= {m for m in modules if under(m, "torch.autograd") or last(m, "api", "reference", "register")}
        bad |= {
            ast.unparse(node)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Attribute) and node.attr in ("autograd", "requires_grad")
        }
    if path.parts[0] == "ops":
        bad |= {m for m in modules if under(m, *WORKBENCH)}
        standard = {m for m in modules if not under(m, *OPS_MAY)}
        bad |= {m for m in standard if m.split(".")[0] not in sys.stdlib_module_names}
    return sorted(bad)


def running_imports(node: ast.AST) -> set[str]:
    """As `imports`, but for those that only annotations need."""
    annotations = (n for n in ast.walk(node) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    for block in annotations:
        block.body = [ast.Pass()]
    return imports(ast.unparse(node))


@pytest.mark.parametrize("package", [SOURCE, MYTORCH], ids=["tilewise", "mytorch"])
def test_no_import_runs_in_a_circle(package):
    files = {path.relative_to(package.parent).with_suffix(""): path for path in package.rglob("*.py")}
    modules = {".".join(place.parts).removesuffix(".__init__"): path for place, path in files.items()}
    graph = {name: running_imports(ast.parse(path.read_text())) & modules.keys() for name, path in modules.items()}
    # A package's __init__ may import from its modules, which name the package as they import from one another.
    graph = {name: {m for m in found if not under(name, m)} for name, found in graph.items()}
    graphlib.TopologicalSorter(graph).prepare()


def found_in(root: Path, rules: Callable[[Path, str], list[str]]) -> dict[str, list[str]]:
    """What every file under `root` imports and must not."""
    found = {path: rules(path.relative_to(root), path.read_text()) for path in sorted(root.rglob("*.py"))}
    assert found
    return {str(path): bad for path, bad in found.items() if bad}


def test_import_rules():
    assert found_in(SOURCE, violations) == {}


def mytorch_violations(path: Path, source: str) -> list[str]:
    """What a file of mytorch imports and must not: numba serves the parallel backend, torch, triton and tilewise the
    one on CUDA.
    """
    modules = {m for m in imports(source) if not under(m, "mytorch")}
    outside = {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names}
    if path.parts[0] != "backends":
        allowed = ("numpy", "safetensors")
    elif path.name == "parallel.py" or "loops" in path.parts:
        # llvmlite is what numba compiles with.
        allowed = ("numpy", "numba", "llvmlite")
    elif path.name.startswith("kernels"):
        allowed = ("triton",)
    elif path.name == "cuda.py" or "gpu" in path.parts:
        allowed = ("numpy", "torch", "triton", "tilewise")
    else:
        # The one who sets their number asks numba for its threads.
        allowed = ("numpy", "numba") if path.name == "__init__.py" else ("numpy",)
    return sorted(m for m in outside if not under(m, *allowed))


def test_mytorch_import_rules():
    assert found_in(MYTORCH, mytorch_violations) == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tensor.py", "import torch"),
        ("nn/linear.py", "from tilewise import flash_attention"),
        ("ops/matrix.py", "import numba"),
        ("backends/serial.py", "from numba import njit"),
        ("backends/parallel.py", "import torch"),
        ("backends/gpu/kernels_rows.py", "import torch"),
        ("data/idx.py", "import scipy"),
    ],
)
def test_the_rules_of_mytorch_catch(path, source):
    assert mytorch_violations(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ops/flash/kernels/fwd.py", "import torch"),
        ("ops/flash/hopper/bwd.py", "import torch"),
        ("ops/nsa/choose/kernels.py", "import torch"),
        ("ops/nsa/choose/launch.py", "from tilewise.ops.nsa import api"),
        ("ops/_device/scores.py", "from tilewise.ops._host import checks"),
        ("ops/flash/reference.py", "import triton.language as tl"),
        ("ops/flash/reference.py", "from tilewise.ops.flash import launch"),
        ("ops/flash/simulate.py", "from tilewise.ops.flash.kernels.fwd import flash_fwd_kernel"),
        ("ops/flash/launch.py", "from torch.autograd import Function"),
        ("ops/flash/launch.py", "import torch\nclass F(torch.autograd.Function): pass"),
        ("ops/flash/launch.py", "from tilewise.ops._host.register import register"),
        ("ops/flash/api.py", "def f():\n    from tilewise.verify import run"),
        ("ops/_host/checks.py", "import numpy"),
        ("doctor/machine.py", "def f():\n    import mytorch"),
    ],
)
def test_the_rules_catch(path, source):
    assert violations(Path(path), source)
