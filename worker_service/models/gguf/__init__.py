"""GGUF files as the worker reads them: the model that one describes, and its weights."""
