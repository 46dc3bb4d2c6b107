"""Modules that the client, the services and the kernels share. They import no higher package, and never torch."""

__version__ = "0.3.0"
