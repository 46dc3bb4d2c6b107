"""The files from which a gateway builds the tokenizer, as a zip in chunks."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

_NAMES = (
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
_PATTERNS = ("*.jinja", "*.model")
_CHUNK_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal files make equal archives


def read_tokenizer_archive(directory: Path) -> bytes:
    """Make the zip of the files that are there. Raises OSError."""
    paths = [directory / name for name in _NAMES]
    paths += [path for pattern in _PATTERNS for path in sorted(directory.glob(pattern))]
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for path in paths:
            if path.is_file():
                entry = zipfile.ZipInfo(path.name, _EPOCH)
                file.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def archive_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Cut the archive into chunks, of which the last carries the digest of the whole."""
    for start in range(0, len(archive), _CHUNK_BYTES):
        chunk = common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
        if start + _CHUNK_BYTES >= len(archive):
            chunk.sha256 = hashlib.sha256(archive).hexdigest()
        yield chunk
