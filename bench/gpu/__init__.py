"""GPU benchmarks of kernels and serving, and of the host's work for the GPU."""
