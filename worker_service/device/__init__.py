"""Computation of rows on an accelerator while the host continues: streams, uploads, graphs and the device's row table.

Modules that use Triton are imported only when they are needed, because the first import of Triton takes long.
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
