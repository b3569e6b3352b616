"""tilewise's attention as a kernel of the Hugging Face Hub: flash-attn's functions, and tilewise's own operators.

The package as it is installed keeps its own operators: both, and several versions, can be loaded side by side.
"""

from .compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .ops.flash.api import flash_attention
from .ops.flash.decode.api import flash_attention_with_kvcache
from .ops.hstu.api import hstu_attention
from .ops.nsa.api import native_sparse_attention, selected_attention

__all__ = [
    "flash_attention",
    "flash_attention_with_kvcache",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "hstu_attention",
    "native_sparse_attention",
    "selected_attention",
]
