"""The files of a model's tokenizer, as both services, routers and commands read them."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.common.gguf.checkpoint_files import tokenizer_config_json
from pagewire.common.gguf.file import GgufFile, is_gguf
from pagewire.common.gguf.model_file import MAX_LISTING_BYTES, read_bytes, read_settings
from pagewire.common.gguf.tokenizer import tokenizer_json
from pagewire.common.gguf.tokenizer_files.changes import TokenizerChanges, changes_of
from pagewire.common.gguf.tokenizer_files.classes import PLAIN
from pagewire.common.gguf.tokenizer_files.settings import (
    CONFIG,
    TokenizerSettings,
    settings_in,
    settings_of,
    without_tokens,
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a checkpoint directory or a GGUF file, as described by all tokenizer files together."""

    path: Path  # of tokenizer.json or the GGUF file
    config: Mapping[str, Any]  # the content of tokenizer_config.json
    settings: TokenizerSettings
    changes: TokenizerChanges | None  # of tokenizer.json, according to the other files
    text: str  # the unchanged text of tokenizer.json
    document: Mapping[str, Any]  # the parsed text; empty if no other file affects it

    @staticmethod
    def of(path: Path) -> "TokenizerFiles":
        """Read the tokenizer of a GGUF file, or a tokenizer.json with the files beside it. Raises OSError if a file
        cannot be read, and GgufError or ValueError if a file is invalid. The message of these errors is one line that
        names the file.
        """
        if is_gguf(path):
            file = GgufFile.open(path)
            config, document = tokenizer_config_json(file), tokenizer_json(file)
            settings, text = settings_in(config, path), json.dumps(document)
        else:
            text = _text(path)
            config, settings = read_settings(path.parent / CONFIG), settings_of(path.parent, text)
            # Without other settings there is nothing to parse. A tokenizer.json that is invalid is reported later.
            document = {} if settings == TokenizerSettings() else _parsed(text, path)
        is_changeable = isinstance(document.get("model"), dict)
        changes = changes_of(settings, document, path) if is_changeable else None
        return TokenizerFiles(path, config, settings, changes, text, document)

    @staticmethod
    def in_directory(directory: Path) -> "TokenizerFiles | None":
        """Read the tokenizer files of a checkpoint directory. Return None if the directory has no tokenizer.json.
        Raises the same errors as `TokenizerFiles.of`.
        """
        path = directory / "tokenizer.json"
        return TokenizerFiles.of(path) if path.is_file() else None

    @property
    def is_plain(self) -> bool:
        """Whether tokenizer.json and tokenizer_config.json alone describe the tokenizer, because no other tokenizer
        file has an effect.
        """
        given = {
            name: value.get("content") if isinstance(value, dict) else value for name, value in self.config.items()
        }
        return self.changes is None and all(given.get(name) == text for name, text in self.settings.texts().items())

    def identity(self) -> bytes:
        """Return bytes that identify the tokenizer. Equal tokenizers have equal bytes. A tokenizer file that changes
        nothing has no influence on the bytes.
        """
        return self.text.encode() + (b"" if self.changes is None else self.changes.key())

    def token_id(self, text: str) -> int | None:
        """Return the id that the tokenizer files assign to the token with this text. Return None if no file gives an
        id: such a token is only named in the files, because it was added after the model was made.
        """
        model = self.document.get("model")
        vocab = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocab, list):
            vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
        added = self.document.get("added_tokens") or []
        found: dict[str, int] = {
            **(vocab or {}),
            **{entry["content"]: entry["id"] for entry in added},
            **{token.content: token_id for token_id, token in self.settings.declared.items()},
        }
        return found.get(text)

    def tokenizer_json(self) -> str:
        """Return the text of a complete tokenizer.json that describes the tokenizer without other files. Raises
        ValueError if the tokenizer files contradict each other.
        """
        return self.text if self.changes is None else self.changes.apply(self.document, self.path)

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the content of the tokenizer_config.json that belongs to the text returned by `tokenizer_json`."""
        return {**without_tokens(self.config), **self.settings.texts(), "tokenizer_class": PLAIN.name}


def read_tokenizer(path: Path) -> str:
    """Return the text of a complete tokenizer.json for a GGUF file, or for a tokenizer.json with the files beside it.
    Raises the same errors as `TokenizerFiles.of`.
    """
    return TokenizerFiles.of(path).tokenizer_json()


def directory_digest(directory: Path, tokenizer: TokenizerFiles | None) -> bytes:
    """Return the SHA-256 of a checkpoint directory's config.json, followed by the tokenizer if there is one. If the
    scheduler and the worker have equal digests, both services use the same model. Raises ModelFileError if config.json
    is too large or a Git LFS pointer, and OSError if it cannot be read.
    """
    digest = hashlib.sha256(read_bytes(directory / "config.json"))
    if tokenizer is not None:
        digest.update(tokenizer.identity())
    return digest.digest()


def _text(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    content = read_bytes(path, MAX_LISTING_BYTES)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is not a tokenizer: it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a tokenizer: it holds {type(document).__name__}, but must hold an object")
    return document
