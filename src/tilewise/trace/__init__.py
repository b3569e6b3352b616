"""A kernel's named values, tile by tile, compared with a simulation of the same tiling, and the first mismatch."""

from tilewise.trace.block import block_flash_attention
from tilewise.trace.record import Event, Recording, record

__all__ = ["Event", "Recording", "block_flash_attention", "record"]
