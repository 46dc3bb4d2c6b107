"""Reads GGUF files for both services: the tokenizer for the scheduler, the weights for the worker.

The package needs neither torch nor numpy. A file is untrusted input: its claims about sizes are checked against the
length of the file before they are used. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from pagewire.common.gguf.architectures import ARCHITECTURES, ROPE_FACTORS, architecture_of
from pagewire.common.gguf.checkpoint_files import config_json, generation_config_json, tokenizer_config_json
from pagewire.common.gguf.file import SUPPORTED_TYPES, ElementType, GgufError, GgufFile, TensorInfo, is_gguf
from pagewire.common.gguf.model_file import (
    MAX_LISTING_BYTES,
    MAX_SETTINGS_BYTES,
    ModelFileError,
    check_pointer,
    fault,
    is_whole,
    read_bytes,
    read_json_value,
    read_settings,
    read_text,
    shown,
    token_ids_of,
    unserved,
)
from pagewire.common.gguf.tokenizer import tokenizer_json

__all__ = [
    "ARCHITECTURES",
    "MAX_LISTING_BYTES",
    "MAX_SETTINGS_BYTES",
    "ROPE_FACTORS",
    "SUPPORTED_TYPES",
    "ElementType",
    "GgufError",
    "GgufFile",
    "ModelFileError",
    "TensorInfo",
    "architecture_of",
    "check_pointer",
    "config_json",
    "fault",
    "generation_config_json",
    "is_gguf",
    "is_whole",
    "read_bytes",
    "read_json_value",
    "read_settings",
    "read_text",
    "shown",
    "token_ids_of",
    "tokenizer_config_json",
    "tokenizer_json",
    "unserved",
]
