"""The CUDA backend by topic: kernels, which are device code alone, in files named kernels_*; their launchers
next to them.
"""
