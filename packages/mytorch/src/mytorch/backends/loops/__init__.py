"""The parallel backend's loops, compiled by numba: C-contiguous arrays of fp32 or fp64 in, memory to fill in as the
last arguments.
"""
