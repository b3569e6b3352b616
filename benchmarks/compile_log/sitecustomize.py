"""Writes down every kernel that Triton compiles or loads from its cache, in this process and in those it starts.

Python imports a module of this name at start-up, so with this folder first in PYTHONPATH helper processes take part
too. Each process appends lines of JSON to a file of its own in the folder that COMPILE_LOG names.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("COMPILE_LOG")


def listener(*, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
    """Triton calls it after each kernel; its times are microseconds."""
    line = {
        "kernel": src.name,
        "hash": metadata["hash"],
        "loaded": cache_hit,
        "seconds": times.total / 1e6,
        "at": time.time(),
        "process": os.getpid(),
    }
    with open(Path(str(FOLDER)) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hands the listener to triton.knobs when something imports it: importing triton here would change the start-up."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with this loader around its own."""
        if name != "triton.knobs":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        return self._loader.create_module(spec) if self._loader else None

    def exec_module(self, module: ModuleType) -> None:
        """As its own loader does, then the listener."""
        assert self._loader is not None
        self._loader.exec_module(module)
        module.compilation.listener = listener


def run_the_other() -> None:
    """The sitecustomize that this one hides, where the machine has one."""
    here = Path(__file__).resolve().parent
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [x for x in sys.path if Path(x).resolve() != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if FOLDER:
    sys.meta_path.insert(0, Finder())
run_the_other()
