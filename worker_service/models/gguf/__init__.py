"""The weights of GGUF files."""
