"""Memory that does not exist, for kernels interpreted at sizes that no machine holds: every access is checked and
nothing is allocated.

Each tensor has addresses of its own, far from all others. Floats read as 0; integers as the tensor's values where it
has any, else as the launch's tables say (`audit_tables`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

# Elements of one table by their number.
Table = Callable[[Any], Any]
# Addresses of one tensor: more than any 47-bit address space has, so that a wrong offset does not reach the next one.
REGION = 1 << 48


@dataclass(frozen=True)
class Address:
    """What a kernel is given in place of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Where the first element lies."""
        return self.address


@dataclass(frozen=True)
class Region:
    """One tensor: the argument's name, bytes an element, elements from the first to the last, and what they hold."""

    name: str
    element_size: int
    elements: int
    values: Table | None


class VirtualMemory:
    """Stands in for the interpreter's own memory operations, and passes everything else on to them."""

    def __init__(self, interpreter: Any, report: Callable[[str], None]) -> None:
        self._interpreter, self._report = interpreter, report
        self._regions: list[Region] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def place(self, arguments: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, Any]:
        """The arguments of a launch with an address in place of each tensor."""
        self._regions.clear()
        return {name: self._placed(name, value, tables) for name, value in arguments.items()}

    def _placed(self, name: str, value: Any, tables: Mapping[str, Table]) -> Any:
        if isinstance(value, TensorDescriptor):
            base = self._placed(name, value.base, tables)
            return TensorDescriptor(base, value.shape, value.strides, value.block_shape)
        if isinstance(value, tuple):
            # A record of the arguments' own, with the names of its fields.
            fields = getattr(value, "_fields", None) or [str(i) for i in range(len(value))]
            names = [name if field == "x" else field for field in fields]
            items = [self._placed(*one, tables) for one in zip(names, value, strict=True)]
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        if not isinstance(value, torch.Tensor):
            return value
        table = tables.get(name)
        if value.device.type != "meta":
            held = value.reshape(-1).numpy()
            table = held.__getitem__
        elements = (
            1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            if value.numel()
            else 0
        )
        self._regions.append(Region(name, value.element_size(), elements, table))
        return Address(value.dtype, len(self._regions) * REGION)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """As the interpreter's: `other` where the mask is false."""
        region, elements = self._locate(pointers, mask, "reads")
        result = np.array(np.broadcast_to(other, pointers.shape), dtype)
        if region is None or region.values is None:
            result[mask] = 0
        elif region.elements:
            result[mask] = region.values(np.clip(elements, 0, region.elements - 1))
        return result

    def store(self, pointers: Any, _values: Any, mask: Any) -> None:
        """As the interpreter's, but nothing is kept."""
        self._locate(pointers, mask, "writes")

    def _locate(self, pointers: Any, mask: Any, verb: str) -> tuple[Region | None, Any]:
        """The tensor that the pointers which the mask keeps lead to, and the numbers of their elements; says where they
        lie outside.
        """
        kept = pointers[mask].astype(np.int64)
        if not kept.size:
            return None, kept
        number = (int(kept[0]) + REGION // 2) // REGION
        if not 0 < number <= len(self._regions):
            self._report(f"{verb} at an address that belongs to no tensor")
            return None, kept
        region = self._regions[number - 1]
        elements = (kept - number * REGION) // region.element_size
        outside = elements[(elements < 0) | (elements >= region.elements)]
        if outside.size:
            self._report(f"{verb} element {int(outside[0]):,} of {region.name}, which has {region.elements:,}")
        return region, elements
