"""Helpers for tests of the worker: logits, shared steps, sampled tokens and host blocks."""
