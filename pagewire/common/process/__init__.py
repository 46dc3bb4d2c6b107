"""The plumbing of a process: its children, signals, limits, log lines, memory and files that it watches."""
