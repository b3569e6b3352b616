"""What the compiler makes of a kernel, with no GPU."""
