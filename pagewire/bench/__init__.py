"""`pagewire bench`: what a server can do, seen by its clients. Flags and JSON keys are those of `vllm bench`."""
