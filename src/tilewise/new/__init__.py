"""`tilewise new`: a small kernel that is right, and its tests, as files to start from.

Both are texts of this package, never imported from it.
"""

import ast
import keyword
import shlex
import sys
from importlib.resources import files
from pathlib import Path

from tilewise.workbench.operator import UsageError

__all__ = ["write"]

# What the two texts call the module.
_NAME = "my_attention"
# A file of one of these names would be imported in place of the package: by itself, its tests or torch.
_TAKEN = sys.stdlib_module_names | {"numpy", "pytest", "tilewise", "torch", "triton"}


def write(path: Path) -> list[str]:
    """Write the kernel to `path`, and its tests next to it.

    Returns:
        Lines that say what was written and what to run next.

    Raises:
        UsageError: where the name will not do, the folder is not there, or a file is. Nothing is overwritten.
    """
    if path.suffix != ".py":
        raise UsageError(f"{path}: expected a name that ends in .py, such as {_NAME}.py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise UsageError(f"{path}: {path.stem} is no Python identifier, and its tests could not import it")
    if path.stem in _TAKEN:
        raise UsageError(f"{path}: the file would hide the module {path.stem}: choose another name")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    tests = path.with_name(f"test_{path.name}")
    for file in (path, tests):
        if file.exists():
            raise UsageError(f"{file} exists already, and is left as it is")
    kernel = files("tilewise.new").joinpath("attention.py.txt").read_text(encoding="utf-8")
    checks = files("tilewise.new").joinpath("test_attention.py.txt").read_text(encoding="utf-8")
    for file, text in ((path, kernel), (tests, checks)):
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(text.replace(_NAME, path.stem))
        except OSError as error:
            raise UsageError(f"{file} cannot be written: {error.strerror}") from None
    # The kernel's docstring ends with the commands, as they are run in its folder.
    commands = (ast.get_docstring(ast.parse(kernel)) or "").partition("\n\n")[2]
    commands = commands.replace(f"test_{_NAME}.py", shlex.quote(str(tests)))
    commands = commands.replace(f"{_NAME}.py:attention", shlex.quote(f"{path}:attention"))
    return [
        f"wrote {path}: attention(q, k, v, *, causal, scale), one Triton kernel, forward only",
        f"wrote {tests}: its tests",
        "run next:",
        *(f"  {line}" for line in commands.splitlines()),
    ]
