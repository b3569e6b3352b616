"""What becomes of what cannot be computed: an error, or torch's attention and one warning."""

import warnings


class Refuse:
    """Called with what is not supported and what to use instead; `fall_back` says whether sdpa may compute it."""

    def __init__(self, *, fall_back: bool) -> None:
        self.fall_back = fall_back
        self.said: set[str] = set()

    def __call__(self, what: str, instead: str, *, sdpa: bool = True) -> None:
        """Raise; or, where sdpa would be right and may be used, warn the first time."""
        if not (self.fall_back and sdpa):
            also = ' (register(unsupported="sdpa") does so for such layers alone)' if sdpa else ""
            raise NotImplementedError(f"tilewise does not support {what}: {instead}{also}")
        if what not in self.said:
            self.said.add(what)
            warnings.warn(f"tilewise does not support {what}: layers with it take transformers' sdpa", stacklevel=3)
