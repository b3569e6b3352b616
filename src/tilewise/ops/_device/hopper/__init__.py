"""Device helpers of the kernels written in Gluon for Hopper."""
