"""The start of a worker: from a configuration to a worker that can compute, or to the reason why it cannot start.

`loader` is the entry point. `preflight`, `resources`, `device_memory`, `pool_size` and `progress` do not need torch and
are imported before torch. Therefore this package's `__init__` imports nothing.
"""
