"""`pagewire bench`: benchmarks of a server as its clients see it, with the flags and JSON keys of `vllm bench`."""
