"""What is read of a model before its weights: from a checkpoint directory, or from a GGUF file."""

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

# Of what `weights_digest` looks at.
_SAMPLE_BYTES = 1 << 12
_MIN_STRIDE = 1 << 20
_MAX_SAMPLES = 1 << 12


def load_config(path: Path) -> Network:
    """Return what a GGUF file describes, or config.json in a checkpoint directory, with a file beside it that says how
    weights are quantised. Raises CheckpointError for a model that is broken or asks for something that is not
    supported."""
    if is_gguf(path):
        return load_gguf_config(path)
    return parse_config(with_quantization_file(read_json(path / CONFIG_FILE), path))


def read_headers(path: Path) -> dict[str, TensorHeader]:
    """Return every tensor by the name that its files have for it. Raises CheckpointError."""
    return read_gguf_headers(path) if is_gguf(path) else checkpoint_files.read_headers(path)


def model_digest(path: Path) -> bytes:
    """Return the 32 bytes by which both services know that they speak of the same model. Raises CheckpointError."""
    return open_gguf(path).digest if is_gguf(path) else checkpoint_files.model_digest(path)


def weights_digest(path: Path) -> str:
    """Say in hexadecimal digits which weights a model has, as far as that is seen at once: by names, sizes and times of
    its files, and by samples of their bytes, of each MiB where there are not too many. Raises OSError.
    """
    files = {path} if is_gguf(path) else {path / header.file for header in read_headers(path).values()}
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
            for start in range(0, status.st_size, max(_MIN_STRIDE, status.st_size // _MAX_SAMPLES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
