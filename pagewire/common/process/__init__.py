"""Utilities for a process: child processes, signals, resource limits, log lines, memory sizes and watched files."""
