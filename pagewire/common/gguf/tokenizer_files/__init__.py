"""A model's tokenizer out of its files: one reading of them, in transformers' order, for both services and routers."""

from pagewire.common.gguf.tokenizer_files.files import TokenizerFiles, directory_digest, read_tokenizer
from pagewire.common.gguf.tokenizer_files.settings import ADDED, NAMES, settings_of

__all__ = ["ADDED", "NAMES", "TokenizerFiles", "directory_digest", "read_tokenizer", "settings_of"]
