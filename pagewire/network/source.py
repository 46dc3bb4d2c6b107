"""Reads the description of a model, before its weights, from a checkpoint directory or a GGUF file."""

import hashlib
import os
from pathlib import Path

from pagewire.common.gguf import is_gguf
from pagewire.network import checkpoint_files
from pagewire.network.checkpoint_files import CONFIG_FILE, TensorHeader, read_json
from pagewire.network.families import parse_config
from pagewire.network.gguf_files import load_gguf_config, open_gguf, read_gguf_headers
from pagewire.network.network import Network
from pagewire.network.quantization import with_quantization_file

# Limits on the samples that `weights_digest` reads.
_SAMPLE_BYTES = 1 << 12
_MIN_STRIDE = 1 << 20
_MAX_SAMPLES = 1 << 12


def load_config(path: Path) -> Network:
    """Return the structure of the model in a GGUF file or a checkpoint directory. In a directory, config.json is read
    and, if present, a separate file of quantisation settings. Raises CheckpointError if the model is broken or not
    supported."""
    if is_gguf(path):
        return load_gguf_config(path)
    return parse_config(with_quantization_file(read_json(path / CONFIG_FILE), path))


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of all weight tensors of a GGUF file or checkpoint directory, by their names in these files.
    Raises CheckpointError if a file is missing, broken or not supported."""
    return read_gguf_headers(path) if is_gguf(path) else checkpoint_files.read_headers(path)


def model_digest(path: Path) -> bytes:
    """Return a digest of 32 bytes that identifies the model in a GGUF file or checkpoint directory. The scheduler
    service and the worker service compare their digests to verify that they use the same model. Raises CheckpointError
    if the files are broken."""
    return open_gguf(path).digest if is_gguf(path) else checkpoint_files.model_digest(path)


def weights_digest(path: Path) -> str:
    """Return a hexadecimal digest that identifies the weights of a model without reading all of them. The digest covers
    the names, sizes and modification times of the files, and samples of their bytes: one sample per MiB, at most about
    4096 per file. Raises OSError if a file cannot be read."""
    of_gguf = open_gguf(path).paths if is_gguf(path) else ()
    files = of_gguf or {path / header.file for header in read_headers(path).values()}
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            for start in range(0, status.st_size, max(_MIN_STRIDE, status.st_size // _MAX_SAMPLES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
