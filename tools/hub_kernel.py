"""Fills integrations/hub/ from the sources, so that it is a kernel of the Hugging Face Hub: `make hub` calls it.

`torch-ext/tilewise/` gets what kernel-builder builds from, `build/torch-<backend>/` the same with what `kernels` reads.
Only the standard library is imported.
"""

import base64
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES, HUB = ROOT / "src" / "tilewise", ROOT / "integrations" / "hub"
# The operators, and flash-attn's functions over them.
PARTS = ("ops", "compat")
INIT = "__init__.py"


def relative(code: str, depth: int) -> str:
    """The code of a file `depth` folders deep, its imports of PARTS relative: `kernels` loads it under a name of its
    own. Other imports of tilewise are for type checkers and for Triton's interpreter.
    """
    return re.sub(rf"(?m)^(\s*)from tilewise\.({'|'.join(PARTS)})\b", rf"\g<1>from {'.' * (depth + 1)}\g<2>", code)


def fill(folder: Path) -> None:
    """The sources next to the package's own __init__.py."""
    for old in folder.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.name != INIT:
            old.unlink()
    for part in PARTS:
        for path in sorted(SOURCES.glob(f"{part}.py")) + sorted((SOURCES / part).rglob("*.py")):
            place = path.relative_to(SOURCES)
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(relative(path.read_text(encoding="utf-8"), len(place.parts) - 1), encoding="utf-8")


def build(sources: Path, target: Path, general: dict[str, object], backend: str) -> None:
    """A variant: the sources, and what they are. Its name is unique to its files: `torch.ops` has it too."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(sources, target, ignore=shutil.ignore_patterns("__pycache__"))
    files = {
        str(path.relative_to(target)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(target.rglob("*.py"))
    }
    unique = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]
    metadata = {
        "id": f"_{general['name']}_{backend}_{unique}",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """The whole folder."""
    general = tomllib.loads((HUB / "build.toml").read_text(encoding="utf-8"))["general"]
    sources = HUB / "torch-ext" / general["name"]
    fill(sources)
    for backend in general["backends"]:
        build(sources, HUB / "build" / f"torch-{backend}", general, backend)
    print(HUB)


if __name__ == "__main__":
    main()
