"""Gluon kernels for Hopper on CPU tensors: the second half of the repaired interpreter.

A kernel's own Python code runs, with tiles that are torch tensors. What is checked does not hang on the schedule that
happened: see `order`.
"""
