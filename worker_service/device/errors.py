"""Tells by an error of the device whether memory did not suffice, or the process cannot compute any more."""

import torch

_CUDA_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: nothing was done, and the device goes on
# Where a library says it in words only: torch's allocator on a CPU, a cuBLAS handle, a kernel that Triton loads.
_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "[CUDA]: out of memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether the same could be computed with more memory, and less of it with what there is."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def is_fatal(error: Exception) -> bool:
    """An error of the device stays: every later call fails too, until a new process begins."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
