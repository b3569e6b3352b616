"""Attention kernels people can trust, tile by tile.

The operators are loaded when they are first named: `import tilewise` imports neither torch nor triton, so that the
command line and the tests can choose how Triton runs before it is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise._explain import Explanation, explain, explaining_on
    from tilewise._warmup import warmup
    from tilewise.ops.bsa.api import block_sparse_attn
    from tilewise.ops.bsa.hstu_bsa import hstu_attention_with_bsa
    from tilewise.ops.flash.api import flash_attention
    from tilewise.ops.flash.decode.api import flash_attention_with_kvcache
    from tilewise.ops.hstu.api import hstu_attention
    from tilewise.ops.nsa.api import compressed_attention, native_sparse_attention, select_blocks, selected_attention
    from tilewise.ops.nsa.attend import native_sparse_attend
    from tilewise.ops.nsa.decode import NSACache, nsa_decode_step

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "NSACache",
    "__version__",
    "block_sparse_attn",
    "compressed_attention",
    "explain",
    "explaining_on",
    "flash_attention",
    "flash_attention_with_kvcache",
    "hstu_attention",
    "hstu_attention_with_bsa",
    "native_sparse_attend",
    "native_sparse_attention",
    "nsa_decode_step",
    "select_blocks",
    "selected_attention",
    "warmup",
]

_HOME = {
    "Explanation": "tilewise._explain",
    "NSACache": "tilewise.ops.nsa.decode",
    "block_sparse_attn": "tilewise.ops.bsa.api",
    "compressed_attention": "tilewise.ops.nsa.api",
    "explain": "tilewise._explain",
    "explaining_on": "tilewise._explain",
    "flash_attention": "tilewise.ops.flash.api",
    "flash_attention_with_kvcache": "tilewise.ops.flash.decode.api",
    "hstu_attention": "tilewise.ops.hstu.api",
    "hstu_attention_with_bsa": "tilewise.ops.bsa.hstu_bsa",
    "native_sparse_attend": "tilewise.ops.nsa.attend",
    "native_sparse_attention": "tilewise.ops.nsa.api",
    "nsa_decode_step": "tilewise.ops.nsa.decode",
    "select_blocks": "tilewise.ops.nsa.api",
    "selected_attention": "tilewise.ops.nsa.api",
    "warmup": "tilewise._warmup",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        # Cached, so that Python does not ask again at every call.
        globals()[name] = value = getattr(importlib.import_module(_HOME[name]), name)
        return value
    raise AttributeError(f"module 'tilewise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
