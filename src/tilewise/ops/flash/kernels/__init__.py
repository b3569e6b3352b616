"""Portable kernels, forward and backward: device code alone."""
