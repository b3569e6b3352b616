"""Where a tensor's memory is."""

from enum import Enum
from typing import Any

import numpy as np

from mytorch.dtypes import ORDER


class Device(Enum):
    """The CPU, or the current CUDA GPU. Wherever a device is taken, the words `"cpu"` and `"cuda"` serve as well."""

    CPU = "cpu"
    CUDA = "cuda"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def _missing_(cls, value: object) -> Any:
        """What `Device(value)` says where the value is neither a device nor the word of one."""
        expected = "a device is Device.CPU or Device.CUDA, or one of the words 'cpu' and 'cuda'"
        types = "an element type is dtype= where a tensor is made, and astype converts to it"
        if not isinstance(value, str):
            hint = f": {types}" if isinstance(value, np.dtype | type) else f" of type {type(value).__name__}"
            raise TypeError(f"{expected}, not {value!r}{hint}") from None
        word = value.strip().lower()
        if word in ("cpu", "cuda"):
            hint = f"did you mean {word!r}?"
        elif word.startswith("cuda"):
            hint = "say 'cuda', the current GPU; CUDA_VISIBLE_DEVICES chooses which that is"
        elif word in map(str, ORDER):
            hint = types
        else:
            hint = "for a GPU say 'cuda', otherwise 'cpu'"
        raise ValueError(f"{expected}, not {value!r}: {hint}") from None
