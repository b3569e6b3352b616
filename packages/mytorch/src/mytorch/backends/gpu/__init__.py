"""The CUDA backend by parts: kernels, which are device code alone, in files named kernels_*; what launches them beside
them.
"""
