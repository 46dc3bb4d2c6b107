"""Reads files of a model that are small enough to read as a whole, up to a maximum size. Git LFS pointer files are
refused: a clone contains them in place of large files that were not fetched. Settings files are JSON objects; their
values are checked by the code that uses them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

# Published settings are far below 1 MB, or about 12 MB if they list the tokens of a codebook. The largest vocabularies
# and weight indexes have about 30 MB.
MAX_SETTINGS_BYTES = 16 << 20
MAX_LISTING_BYTES = 128 << 20
_MAX_ERROR = 200  # characters of an error message
_MIN_SHOWN, _MAX_SHOWN = 20, 100  # characters of a long value in it
_POINTER = b"version https://git-lfs.github.com/spec/"


class ModelFileError(ValueError):
    """A file of a model cannot be used. The error message is one line that names the file and the remedy."""


def check_pointer(path: Path) -> None:
    """Check that a file contains real data. Raises ModelFileError if the file is a Git LFS pointer, and OSError if the
    file cannot be read.
    """
    with path.open("rb") as stream:
        _check(path, stream.read(len(_POINTER)))


def read_bytes(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Return the content of a model's file. Raises ModelFileError if the file has more than `max_bytes` bytes or is a
    Git LFS pointer, and OSError if the file cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            size = max(len(content), os.fstat(stream.fileno()).st_size)
            raise ModelFileError(
                f"{path} has {size} bytes; the maximum is {max_bytes}: use the file published with the model"
            )
    _check(path, content)
    return content


def read_text(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Return the text of a model's file in UTF-8. Raises UnicodeDecodeError if the file is not UTF-8, ModelFileError if
    it is too large or a Git LFS pointer, and OSError if it cannot be read.
    """
    return read_bytes(path, max_bytes).decode("utf-8")


def _check(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise ModelFileError(
            f"{path} is a Git LFS pointer in place of the file: run `git lfs pull` in the clone that it is from"
        )


def read_json_value(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Return the JSON value in a model's file. Raises ValueError, whose message is one line that names the file, if the
    file is not JSON or too large. Raises OSError if the file cannot be read.
    """
    content = read_bytes(path, max_bytes)
    try:
        value = json.loads(content.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{path}: {error.object[error.start]!r} is an unpaired surrogate, which text may not contain"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not readable JSON: it is nested too deeply") from error
    return value


def read_settings(path: Path, *, required: bool = False, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Return the JSON object in a settings file of a model, such as config.json. Return an empty object if the file is
    missing and not `required`. Raises ValueError, whose message is one line that names the file, if the file is not
    usable.
    """
    if not path.is_file():
        if required:
            raise ValueError(f"{path} is missing: --model must name a checkpoint directory as published")
        return {}
    content = read_json_value(path, max_bytes)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, but must hold an object")
    return content


def unserved(file: Path, key: str, value: Any, expected: str) -> ValueError:
    """Return the error for a setting in a model's file whose value is not supported. `expected` says what the value
    must be.
    """
    return ValueError(fault(f"{file}: {key}", value, expected))


def fault(place: str, value: Any, expected: str) -> str:
    """Return the error message for a setting whose value is not supported: where the setting is, its value, and what
    the value must be. A long value is shortened, so that the message has at most about 200 characters."""
    start, end = f"{place} is ", f", but must be {expected}"
    left = _MAX_ERROR - len(start) - len(end) - len("...")
    return f"{start}{shown(value, max(_MIN_SHOWN, min(left, _MAX_SHOWN)))}{end}"


def shown(value: Any, max_chars: int = _MAX_SHOWN) -> str:
    """Return a value as JSON for an error message, shortened to about `max_chars` characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids_of(settings: Mapping[str, Any], key: str, file: Path) -> set[int]:
    """Return the set of token ids in a model's setting, whose value may be one id or a list of ids. An id that is null
    or -1 means no token. Return an empty set if the setting is missing. Raises ValueError for an invalid id.
    """
    value = settings.get(key)
    token_ids = [each for each in (value if isinstance(value, list) else [value]) if each is not None and each != -1]
    if not all(is_whole(token_id) and 0 <= token_id < 2**31 for token_id in token_ids):
        raise unserved(file, key, value, f"a token id from 0 to {2**31 - 1} or a list of them")
    return set(token_ids)
