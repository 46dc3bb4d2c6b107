"""From a configuration to a worker that can compute, or why there can be none.

`loader` is the way in. `preflight`, `resources`, `device_memory`, `pool_size` and `progress` need no torch, and are
imported before it: so nothing is imported here.
"""
