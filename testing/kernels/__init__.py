"""Real or emulated compilers, processors, devices and drivers for tests of kernels."""
