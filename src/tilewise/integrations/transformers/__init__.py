"""Hugging Face transformers: `register()`, then `attn_implementation="tilewise"`."""

__all__ = ["register"]

NAME = "tilewise"
OLDEST = (5, 4)


def register(unsupported: str = "raise") -> None:
    """Make `attn_implementation="tilewise"` known to transformers, and so `model.set_attn_implementation("tilewise")`.

    Args:
        unsupported: what becomes of a layer whose mask or options tilewise cannot express: `raise`, which names them
            and what to use instead, or `sdpa`: transformers' own function of that name computes it with the full mask,
            and one warning names it. What sdpa would drop raises all the same.

    Needs transformers 5.4 or newer, which is imported here. Called again, the last call holds.
    """
    if unsupported not in ("raise", "sdpa"):
        raise ValueError(f"unsupported is {unsupported!r}: expected 'raise' or 'sdpa'")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "transformers is not installed: pip install 'tilewise[transformers]', or 'transformers>=5.4'"
        ) from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(
            f"transformers is {transformers.__version__}: expected 5.4 or newer: older ones describe masks otherwise"
        )
    from tilewise.integrations.transformers.attend import attention
    from tilewise.integrations.transformers.masks import mask
    from tilewise.integrations.transformers.refuse import Refuse

    refuse = Refuse(fall_back=unsupported == "sdpa")
    transformers.AttentionInterface.register(NAME, attention(refuse))
    transformers.AttentionMaskInterface.register(NAME, mask(refuse))
