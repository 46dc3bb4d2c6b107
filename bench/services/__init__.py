"""Benchmarks of both services, run as processes."""
