"""Computes rows on an accelerator, while the host goes on: streams, uploads, graphs, and the tokens that stay there.

What Triton compiles is imported only where it computes: the first import takes long.
"""

from worker_service.device.computation import DeviceComputation
from worker_service.device.cuda import CudaDevice, is_fatal, is_out_of_memory
from worker_service.device.kernels import create_device_operations, create_sampler

__all__ = [
    "CudaDevice",
    "DeviceComputation",
    "create_device_operations",
    "create_sampler",
    "is_fatal",
    "is_out_of_memory",
]
