"""A probe of the compiler: does this Triton get the product of a transposed product right?"""

from tilewise.ops.probe.launch import transposed_product_error

__all__ = ["transposed_product_error"]
