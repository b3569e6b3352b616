"""Block-sparse attention for HSTU."""
