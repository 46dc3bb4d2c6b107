"""Benchmarks of Pagewire and other engines under the same load."""
