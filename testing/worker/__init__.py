"""Logits, shared steps, drawn tokens and blocks of the host, for tests of the worker."""
