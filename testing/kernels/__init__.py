"""Compilers, processors, devices and drivers, real or emulated, for tests of kernels."""
