"""An LRU cache."""

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """Values by key, up to a maximum: beyond it only the least recently used one is evicted. Threads may share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[tuple[Any, ...], Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...]) -> Value | None:
        """The value of a key, None where there is none; counts as a use."""
        value = self._values.get(key)
        if value is not None:
            try:  # noqa: SIM105 (a context manager would take longer than the rest)
                self._values.move_to_end(key)
            except KeyError:
                # Another thread has just made room.
                pass
        return value

    def add(self, key: tuple[Any, ...], value: Value) -> Value:
        """Keep a value."""
        with self._lock:
            self._values[key] = value
            while len(self._values) > self.most:
                self._values.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()

    def __len__(self) -> int:
        return len(self._values)
