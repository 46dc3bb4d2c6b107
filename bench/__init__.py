"""Benchmarks of Pagewire, alone and in comparison with other engines. They are not installed with the package."""
