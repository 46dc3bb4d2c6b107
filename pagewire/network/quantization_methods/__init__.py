"""Parsers of quantisation methods, one module per tool. `pagewire.network.quantization` lists them."""
