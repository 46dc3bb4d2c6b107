"""What tests and benchmarks share: services as processes, made checkpoints, a scheduler in-process. Not installed."""
