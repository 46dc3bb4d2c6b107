"""The floor that client, services and kernels stand on. It imports nothing that lies above it, and never torch."""

__version__ = "0.2.0"
