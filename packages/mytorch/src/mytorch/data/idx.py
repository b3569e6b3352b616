"""Files in the IDX format, in which MNIST and its relatives come.

Two bytes 0, one for the element type, one for the number of axes; each axis' length in four bytes; then the elements,
all big-endian.
"""

import gzip
import math
import os
import zlib
from pathlib import Path

import numpy as np

TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"


def load_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an IDX file, compressed by gzip or not, in the file's element type."""
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no IDX file {file}: check the path, or download the file first")
    content = _unpacked(file)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in TYPES:
        expected = ", ".join(f"{code:02x}" for code in TYPES)
        raise ValueError(
            f"{file} is no IDX file: it must begin with 00 00 and a type among {expected}, and begins with"
            f" {content[:4].hex(' ')!r}"
        )
    kind, n_axes = np.dtype(TYPES[content[2]]), content[3]
    start = 4 + 4 * n_axes
    if len(content) < start:
        raise ValueError(
            f"{file} is truncated: {n_axes} axes take a header of {start} bytes, and the file has {len(content)}:"
            " download it again"
        )
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    expected_size = start + math.prod(shape) * kind.itemsize
    if len(content) != expected_size:
        what = "truncated" if len(content) < expected_size else "too long"
        raise ValueError(
            f"{file} is {what}: shape {list(shape)} of {kind.itemsize}-byte elements takes {expected_size} bytes, "
            f"and the file has {len(content)}: download it again"
        )
    return np.frombuffer(content, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="))


def _unpacked(file: Path) -> bytes:
    content = file.read_bytes()
    if not content.startswith(GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{file} is a truncated or damaged gzip file ({error}): download it again") from error
