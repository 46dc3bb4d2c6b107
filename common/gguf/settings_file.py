"""Files of settings beside a checkpoint's weights: JSON objects, whose values are checked where they are read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from pagewire.common.gguf.model_file import ModelFileError, read_text

_MAX_SHOWN = 100  # characters of a value in an error


def read_settings(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object, which is empty where the file is missing. Raises ValueError, one line that names the file."""
    if not path.is_file():
        if required:
            raise ValueError(f"{path} is missing: --model must name a checkpoint directory as published")
        return {}
    try:
        content = json.loads(read_text(path))
        json.dumps(content, ensure_ascii=False).encode()
    except ModelFileError:
        raise
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}: {error.object[error.start]!r} is half a character, which no text may have") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from error
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
