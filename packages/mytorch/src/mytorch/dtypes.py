"""Element types: NumPy's, five of them, and how two combine."""

from typing import Any

import numpy as np

DType = np.dtype[Any]

float16 = np.dtype(np.float16)
float32 = np.dtype(np.float32)
float64 = np.dtype(np.float64)
int64 = np.dtype(np.int64)
bool_ = np.dtype(np.bool_)

# Each combines with those before it into itself.
ORDER = (bool_, int64, float16, float32, float64)


def is_float(dtype: DType) -> bool:
    """Whether values of this type can have gradients."""
    return dtype.kind == "f"


def promote(*dtypes: DType) -> DType:
    """The type of what is computed from several tensors: the one that stands last in bool, int64, float16, float32,
    float64.
    """
    return max(dtypes, key=ORDER.index)


def check(dtype: Any) -> DType:
    """A NumPy dtype out of whatever NumPy takes for one; other than the five is an error."""
    found = np.dtype(dtype)
    if found not in ORDER:
        raise TypeError(f"dtype {found} is not one of {', '.join(map(str, ORDER))}: convert the data first")
    return found


def supported(data: Any, dtype: Any = None) -> np.ndarray:
    """Data as a NumPy array of a type; without one, of its own: other integers become int64, Python's floats fp32."""
    x = np.asarray(data)
    if dtype is not None:
        return x.astype(check(dtype))
    if x.dtype.kind in "iu":
        return x.astype(np.int64)
    return (
        x.astype(np.float32)
        if x.dtype.kind == "f" and not isinstance(data, np.ndarray | np.generic)
        else x.astype(check(x.dtype), copy=False)
    )
