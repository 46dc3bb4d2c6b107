"""Weights of floats that are quantised while they load (`--quantization`)."""
