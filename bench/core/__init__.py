"""Benchmarks of parts of the engine, each in one process."""
