"""Kernels for GPUs, in Triton: functions on tensors. What each computes is specified in `kernels/reference.py`."""
