"""Files of a model that are read whole: of bounded size, and never pointers of Git LFS, which a clone holds in place of
large files that were not fetched. Those of settings are JSON objects, whose values are checked where they are read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

# Of settings, which have far below a megabyte as published, or some 12 where they list a codebook's tokens; and of a
# vocabulary or an index of weights, of which the largest have some 30 MB.
MAX_SETTINGS_BYTES = 16 << 20
MAX_LISTING_BYTES = 128 << 20
_MAX_SHOWN = 100  # characters of a value in an error
_POINTER = b"version https://git-lfs.github.com/spec/"


class ModelFileError(ValueError):
    """A file that is not read. The text is one line that names the file and the remedy."""


def check_pointer(path: Path) -> None:
    """Raises ModelFileError for a pointer, and OSError for what cannot be read."""
    with path.open("rb") as stream:
        _check(path, stream.read(len(_POINTER)))


def read_bytes(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> bytes:
    """Read a file, but not one that is larger than it can be. Raises ModelFileError, OSError."""
    with path.open("rb") as stream:
        content = stream.read(max_bytes + 1)
        if len(content) > max_bytes:
            size = max(len(content), os.fstat(stream.fileno()).st_size)
            raise ModelFileError(
                f"{path} has {size} bytes; {max_bytes} are the most: take the file that the model was published with"
            )
    _check(path, content)
    return content


def read_text(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Raises ModelFileError, OSError, or UnicodeDecodeError for what is no text."""
    return read_bytes(path, max_bytes).decode("utf-8")


def _check(path: Path, content: bytes) -> None:
    if content.startswith(_POINTER):
        raise ModelFileError(
            f"{path} is a pointer of Git LFS in place of the file: run `git lfs pull` in the clone that it is from"
        )


def read_json_value(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Raises ValueError, one line that names the file, and OSError."""
    content = read_bytes(path, max_bytes)
    try:
        value = json.loads(content.decode())
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}: {error.object[error.start]!r} is half a character, which no text may have") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    return value


def read_settings(path: Path, *, required: bool = False, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read a JSON object, which is empty where the file is missing. Raises ValueError, one line that names the file."""
    if not path.is_file():
        if required:
            raise ValueError(f"{path} is missing: --model must name a checkpoint directory as published")
        return {}
    content = read_json_value(path, max_bytes)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, but must hold an object")
    return content


def unserved(file: Path, key: str, value: Any, expected: str) -> ValueError:
    """Return the error for a value that means nothing here."""
    return ValueError(f"{file}: {key} is {shown(value)}, but must be {expected}")


def shown(value: Any) -> str:
    """Return a value as a message shows it, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def token_ids_of(settings: Mapping[str, Any], key: str, file: Path) -> set[int]:
    """Return the ids that a setting names, one or a list of them. Raises ValueError."""
    value = settings.get(key)
    token_ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_whole(token_id) and 0 <= token_id < 2**31 for token_id in token_ids):
        raise unserved(file, key, value, f"a token id from 0 to {2**31 - 1} or a list of them")
    return set(token_ids)
