"""A probe of the compiler: does this Triton get products of tiles of different widths right?"""
