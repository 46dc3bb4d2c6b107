"""Generators of checkpoints with random weights for tests and benchmarks."""
