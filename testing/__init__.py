"""Code shared by tests and benchmarks: services as processes, generated checkpoints, a scheduler in-process.

This package is not installed.
"""
