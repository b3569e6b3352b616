"""The guarded import of Gluon: by names, never raising, and in other processes where something is missing."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.ops._host import gluon

OPS = Path(gluon.__file__).parent.parent
# As the kernels call them -> where they come from.
ALIASES = {
    "gluon": "triton.experimental.gluon",
    "gl": "triton.experimental.gluon.language",
    "mbarrier": "triton.experimental.gluon.language.nvidia.hopper",
    "tma": "triton.experimental.gluon.language.nvidia.hopper",
}
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "{0}" or name.startswith("{0}."):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocked())
"""
WITHOUT_A_NAME = "from triton.experimental.gluon.language.nvidia import hopper; del hopper.warpgroup_mma_wait\n"
BROKEN = "import sys, types; sys.modules['triton'] = types.ModuleType('triton')\n"
NEWER = "import triton; triton.__version__ = '3.10.0'\n"
ASK = """
from tilewise.ops._host import gluon
print(gluon.AVAILABLE, gluon.usable(), gluon.TensorDescriptor, gluon.why_off())
"""
LOST = "has no warpgroup_mma_wait in triton.experimental.gluon.language.nvidia.hopper"


def run(code, *flags):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_this_triton_has_all_that_the_kernels_need():
    assert gluon.AVAILABLE
    assert gluon.usable()
    assert gluon.why_off() is None
    assert gluon.gl.float16 is not None
    assert gluon.TensorDescriptor is not None


def used_names():
    """What files that import Gluon use of it: (module, name)."""
    for path in sorted(OPS.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.name == "gluon.py" or "triton.experimental" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("triton.experimental"):
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ALIASES:
                prefix = "" if node.value.id in ("gluon", "gl") else f"{node.value.id}."
                yield ALIASES[node.value.id], prefix + node.attr


def test_every_name_that_a_kernel_uses_is_looked_for():
    """A name that is not would end in an ImportError, or worse, with the next Triton that renames it."""
    needed = {(place, one) for place, names in gluon.NEEDED.items() for name in names for one in name.split("|")}
    # Of a dotted name also what stands before the dot: a module, or a class of which a method is used.
    needed |= {(place, name.split(".")[0]) for place, name in needed}
    needed |= {("triton.experimental", "gluon"), ("triton.experimental.gluon", "language")}
    used = set(used_names())
    assert used - needed == set()
    assert len(used) > 40


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (BLOCKED.format("triton"), "triton cannot be imported (no module named triton)"),
        (BLOCKED.format("triton.experimental"), "(no module named triton.experimental)"),
        (BLOCKED.format("triton.experimental.gluon.nvidia"), "Gluon cannot be imported from Triton "),
        (WITHOUT_A_NAME, LOST),
        (BROKEN, "triton cannot be imported (AttributeError: "),
    ],
    ids=["no-triton", "no-experimental", "no-descriptor", "no-name", "broken-triton"],
)
def test_what_is_missing_is_said_and_nothing_raises(before, reason):
    assert run(before + ASK, "-W", "error").startswith("False False None ")
    said = run(before + ASK)
    assert reason in said
    assert "/" not in said


def test_a_newer_triton_whose_gluon_differs_warns_once_when_it_is_asked():
    """Not at the import, which may never raise and happens on machines that these kernels are not for."""
    warned = (
        "import warnings\nwith warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n    from tilewise.ops._host import gluon\n    print(len(caught))\n"
        "    print([gluon.usable() for _ in range(3)], len(caught), [str(one.message) for one in caught])"
    )
    found = run(NEWER + WITHOUT_A_NAME + warned)
    assert found.startswith("0\n[False, False, False] 1 ['tilewise runs its portable kernels, not those for Hopper: ")
    assert LOST in found
    assert "newer than 3.9" in found
    assert run(WITHOUT_A_NAME + warned) == "0\n[False, False, False] 0 []"
    assert run(NEWER + warned) == "0\n[True, True, True] 0 []"


@pytest.mark.parametrize(("new", "old"), [("load", "global_to_shared"), ("store", "shared_to_global")])
def test_of_a_renamed_function_either_name_will_do(new, old):
    new, old = f"async_{new}", f"async_copy_{old}"
    before = "from triton.experimental.gluon.language.nvidia import hopper\n"
    for name, other in ((old, new), (new, old)):
        code = f"vars(hopper.tma).setdefault('{name}', 1); vars(hopper.tma).pop('{other}', 0)\n"
        assert run(before + code + ASK).startswith("True True ")
    neither = f"[vars(hopper.tma).pop(name, 0) for name in ('{old}', '{new}')]\n"
    assert f"has no tma.{new}|tma.{old} in" in run(before + neither + ASK)
