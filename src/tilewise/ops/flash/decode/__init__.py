"""Attention over a cache: decoding and prefill."""
