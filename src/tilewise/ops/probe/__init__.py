"""A probe of the compiler: does this Triton get the product of a transposed product right?"""
