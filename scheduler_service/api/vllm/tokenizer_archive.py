"""The tokenizer's files as a zip archive in chunks, for routers."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

from pagewire.common.gguf import MAX_LISTING_BYTES, GgufFile, config_json, generation_config_json, is_gguf, read_bytes
from pagewire.common.gguf.tokenizer_files import ADDED, NAMES, TokenizerFiles
from scheduler_service.serving.checkpoint.model_info import ModelInfo

_CONFIG, _TOKENIZER, _TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"
_SMALL = ("config.json", "generation_config.json")
_PATTERNS = ("*.jinja", "*.model")
_CHUNK_BYTES = 64 * 1024
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed date, so that equal files give equal archives


def read_tokenizer_archive(model: ModelInfo) -> bytes:
    """Return a zip archive of the files of a model's tokenizer, as bytes, with the chat template that is served.

    If the tokenizer is stored in files of another format, the archive contains an equivalent tokenizer.json and
    tokenizer_config.json.

    Raise OSError or ValueError if a file has become unreadable since the service started.
    """
    path = model.directory
    contents = dict(_gguf_files(path) if is_gguf(path) else _directory_files(path))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in {**contents, **_one_template(model.chat_template, contents)}.items():
            file.writestr(zipfile.ZipInfo(name, _EPOCH), content, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def _directory_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    tokenizer = TokenizerFiles.of(directory / _TOKENIZER)
    names = (*_SMALL, *((_TOKENIZER, _CONFIG, NAMES, ADDED) if tokenizer.is_plain else ()))
    paths = [directory / name for name in names]
    paths += [path for pattern in _PATTERNS for path in sorted(directory.glob(pattern))]
    yield from ((path.name, read_bytes(path, MAX_LISTING_BYTES)) for path in paths if path.is_file())
    if not tokenizer.is_plain:
        yield from _tokenizer_files(tokenizer)


def _gguf_files(path: Path) -> Iterator[tuple[str, bytes]]:
    file = GgufFile.open(path)
    for name, content in zip(_SMALL, (config_json(file), generation_config_json(file)), strict=True):
        yield name, json.dumps(content).encode()
    yield from _tokenizer_files(TokenizerFiles.of(path))


def _tokenizer_files(tokenizer: TokenizerFiles) -> Iterator[tuple[str, bytes]]:
    yield _TOKENIZER, tokenizer.tokenizer_json().encode()
    yield _CONFIG, json.dumps(tokenizer.tokenizer_config()).encode()


def _one_template(template: str | None, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Make sure that a router finds the served chat template in the archive. Return the files to replace or add, as a
    mapping from name to content.

    A router supports neither a list of templates in tokenizer_config.json nor template files with other names.
    """
    config = json.loads(contents.get(_CONFIG, b"{}"))
    in_config = config.get("chat_template")
    stated = contents[_TEMPLATE].decode() if _TEMPLATE in contents else in_config
    changed = {}
    if template is not None and stated != template:
        changed[_TEMPLATE] = template.encode()
    if not isinstance(in_config, str | None):
        changed[_CONFIG] = json.dumps(config | {"chat_template": template}).encode()
    return changed


def archive_chunks(archive: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """Yield the archive of the tokenizer in chunks. The last chunk also contains the SHA-256 digest of the whole
    archive."""
    for start in range(0, len(archive), _CHUNK_BYTES):
        chunk = common_pb2.GetTokenizerChunk(data=archive[start : start + _CHUNK_BYTES])
        if start + _CHUNK_BYTES >= len(archive):
            chunk.sha256 = hashlib.sha256(archive).hexdigest()
        yield chunk
