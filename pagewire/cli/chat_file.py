"""The file of a saved chat: its system message, messages and sampling parameters, as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagewire.cli import client_flags
from pagewire.client.arguments import require
from pagewire.client.errors import CommandError
from pagewire.client.sampling_params import UNSET, SamplingParams, is_list
from pagewire.common.strict_json import from_json

ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class SavedChat:
    """A chat as it is saved. `turns` are pairs of a user message and the model's answer."""

    system: str | None
    turns: tuple[tuple[str, str], ...]
    sampling: SamplingParams


def write(path: Path, chat: SavedChat) -> None:
    """Write a chat to a file. Raise CommandError if the file cannot be written."""
    contents = {
        "system": chat.system,
        "messages": [{"role": role, "content": turn[index]} for turn in chat.turns for index, role in enumerate(ROLES)],
        "sampling": given(chat.sampling),
    }
    try:
        path.write_text(json.dumps(contents, ensure_ascii=False, indent=2) + "\n", "utf-8", "replace")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def read(path: Path) -> SavedChat:
    """Read a chat that `write` has written. Raise CommandError if the file cannot be read, or if its content is
    invalid."""
    try:
        contents = from_json(path.read_text("utf-8"))
        require("the file", contents, isinstance(contents, dict), "a JSON object")
        system, messages, sampling = (contents.get(name) for name in ("system", "messages", "sampling"))
        require("system", system, isinstance(system, str | None), "a text or null")
        require("sampling", sampling, isinstance(sampling, dict), "a JSON object")
        is_legal = is_list(messages, _is_message) and len(messages) % 2 == 0
        is_legal = is_legal and all(each["role"] == ROLES[index % 2] for index, each in enumerate(messages))
        require("messages", messages, is_legal, "texts of user and assistant in turn")
        texts = [message["content"] for message in messages]
        turns = zip(texts[::2], texts[1::2], strict=True)
        return SavedChat(system, tuple(turns), client_flags.updated(UNSET, sampling))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    except (TypeError, ValueError, CommandError) as error:
        raise CommandError(f"{path} is no saved chat: {error}") from None


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and "role" in value


def given(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that are set, by name, as values of JSON."""
    return {name: value for name, value in asdict(sampling).items() if value is not None}
