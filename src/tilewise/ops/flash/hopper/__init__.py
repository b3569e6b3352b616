"""Kernels of Hopper's own, in Gluon: device code, tile sizes and launches."""
