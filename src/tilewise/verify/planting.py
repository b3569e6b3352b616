"""Plants a bug: rewrites the source of one module of tilewise.ops or tilewise.parallel as it is imported."""

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Sequence
from types import ModuleType

from tilewise.verify.suite import Mutant


def plant(mutant: Mutant) -> None:
    """From now on this process imports `mutant.module` with its bug; nothing of tilewise.ops or tilewise.parallel
    may have been imported before.
    """
    imported = [name for name in sys.modules if name.startswith(("tilewise.ops", "tilewise.parallel"))]
    if imported:
        raise RuntimeError(
            f"{imported[0]} is already imported, so {mutant.name!r} cannot be planted: plant in a fresh process"
        )
    sys.meta_path.insert(0, _Finder(mutant))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._mutant.planted_in:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(fullname)
        with open(spec.origin, encoding="utf-8") as file:
            source = self._mutant.plant(file.read())
        loader = _Loader(f"<{self._mutant.name} in {self._mutant.module}>", source)
        return importlib.util.spec_from_loader(fullname, loader)


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, filename: str, source: str) -> None:
        self._filename, self._source = filename, source
        # Triton finds a kernel's source by its file name.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)

    def get_filename(self, _fullname: str) -> str:
        return self._filename

    def get_data(self, _path: str) -> bytes:
        return self._source.encode()
