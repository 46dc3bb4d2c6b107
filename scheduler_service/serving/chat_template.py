"""A checkpoint's chat template: where it is, and whether it can be used. Gateways and clients render it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.gguf import LfsPointerError, read_text
from scheduler_service.serving.template_sandbox import Overspent, Template, TemplateFailure

_QUESTION = {"messages": [{"role": "user", "content": "Hello"}], "add_generation_prompt": True}


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    source: Path  # the file it is from

    def fault(self) -> str | None:
        """Why it makes no prompt of a plain question, if it makes none.

        Raises ValueError if it does not end: whoever renders it, a gateway say, would be busy with it for ever.
        """
        try:
            Template(self.text).render(_QUESTION)
        except Overspent as error:
            raise ValueError(f"{self.source}: the chat template makes no prompt of a plain question: {error}") from None
        except TemplateFailure as error:
            return f"{self.source}: the chat template makes no prompt of a plain question: {error}"
        return None


def read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Read chat_template.jinja, or else the (default) chat_template of tokenizer_config.json. Raises ValueError."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(_read_text(path), path)
    path = directory / "tokenizer_config.json"
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in found):
            raise ValueError(f"{path}: chat_template is a list, but not one of objects that have a name and a template")
        found = {entry["name"]: entry.get("template") for entry in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{path}: chat_template is {type(found).__name__}, but must be a text or a list of templates")
    return None if found is None else ChatTemplate(found, path)


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except LfsPointerError as error:
        raise ValueError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x})"
        ) from None
