"""Attention over a cache, for the workbench."""
