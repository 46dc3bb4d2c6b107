"""Computation of rows on the CPU. A step is done when `launch` returns."""

from worker_service.host.computation import HostComputation
from worker_service.host.cpu_decoder import host_model
from worker_service.host.cpu_operations import create_host_operations
from worker_service.host.packed_cache import PackedCache

__all__ = [
    "HostComputation",
    "PackedCache",
    "create_host_operations",
    "host_model",
]
