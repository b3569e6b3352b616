"""Attention kernels people can trust, tile by tile.

The operators are loaded when they are first named: `import tilewise` imports neither torch nor triton, so that the command line and the
tests can choose how Triton runs before it is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.ops.flash.api import flash_attention

__version__ = "0.1.0"
__all__ = ["__version__", "flash_attention"]

_HOME = {"flash_attention": "tilewise.ops.flash.api"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        # Kept, so that Python does not ask again at every call.
        globals()[name] = value = getattr(importlib.import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
