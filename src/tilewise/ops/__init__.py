"""The operators, one folder each."""
