"""Benchmarks that the repository runs of itself and beside others. Not installed."""
