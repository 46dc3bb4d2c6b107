"""Reads a model's tokenizer from its files in the same way as transformers, for both services and routers."""

from pagewire.common.gguf.tokenizer_files.files import TokenizerFiles, directory_digest, read_tokenizer
from pagewire.common.gguf.tokenizer_files.settings import ADDED, NAMES, settings_of

__all__ = ["ADDED", "NAMES", "TokenizerFiles", "directory_digest", "read_tokenizer", "settings_of"]
