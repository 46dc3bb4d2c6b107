"""A checkpoint's chat template: where it is, and whether it can be used. Gateways and clients render it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.gguf import read_text
from scheduler_service.serving.settings_file import read_settings
from scheduler_service.serving.template_sandbox import MAX_TEMPLATE_CHARS, Overspent, Template, TemplateFailure

_QUESTION = {
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
}
_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # names that transformers chooses by; it takes others only from callers
_MAX_NAMED = 64
_MAX_FILE_BYTES = 4 * MAX_TEMPLATE_CHARS
_NO_DEFAULT = "{{ raise_exception('this model has a chat template for tools alone: give tools') }}"
# An empty text at each border keeps the tags from taking whitespace of the templates along.
_CHOICE = (
    "{{% if tools is not defined or tools is none %}}{{{{ '' }}}}{}{{{{ '' }}}}"
    "{{% else %}}{{{{ '' }}}}{}{{{{ '' }}}}{{% endif %}}"
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    source: Path  # the file it is from
    is_plain: bool  # it stands in its files as it is, where any gateway finds it

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
    """Read chat_template.jinja, or else the chat_template of tokenizer_config.json, or else of chat_template.json, with
    the template for tools that may lie beside it. Raises ValueError."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        named = {_DEFAULT: _read_text(path)}
    else:
        path = directory / "tokenizer_config.json"
        named = _named(tokenizer_config, path)
        if not named:
            path = directory / "chat_template.json"
            named = _named(read_settings(path), path)
    for_tools = directory / "additional_chat_templates" / f"{_FOR_TOOLS}.jinja"
    if for_tools.is_file():
        named[_FOR_TOOLS] = _read_text(for_tools)
    is_plain = path.name != "chat_template.json" and _is_plain(tokenizer_config)
    return _joined(named, path, is_plain=is_plain)


def chat_template_of(tokenizer_config: Mapping[str, Any], source: Path) -> ChatTemplate | None:
    """Take the template from what tokenizer_config.json would hold. Raises ValueError."""
    return _joined(_named(tokenizer_config, source), source, is_plain=_is_plain(tokenizer_config))


def _is_plain(tokenizer_config: Mapping[str, Any]) -> bool:
    return isinstance(tokenizer_config.get("chat_template"), str | None)


def _named(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the templates of a file by their names, of which a single one is the default. Raises ValueError."""
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return {} if found is None else {_DEFAULT: found}
    if isinstance(found, dict):
        found = [{"name": name, "template": template} for name, template in found.items()]
    if not isinstance(found, list):
        raise ValueError(f"{path}: chat_template is {type(found).__name__}, but must be a text or a list of templates")
    if len(found) > _MAX_NAMED:
        raise ValueError(f"{path}: chat_template is a list of {len(found)} templates; {_MAX_NAMED} are the most")
    for entry in found:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(f"{path}: chat_template is a list, but not one of objects that have a name and a template")
    return {entry["name"]: entry["template"] for entry in found}


def _joined(named: Mapping[str, str], source: Path, *, is_plain: bool) -> ChatTemplate | None:
    """Make one template of the default and of that for tools, which chooses as transformers does, so that gateways,
    which take one, and clients need not know of names."""
    if _FOR_TOOLS not in named:
        return ChatTemplate(named[_DEFAULT], source, is_plain) if _DEFAULT in named else None
    # A template's last newline is not part of it.
    default, for_tools = (
        named.get(name, _NO_DEFAULT).removesuffix("\n").removesuffix("\r") for name in (_DEFAULT, _FOR_TOOLS)
    )
    text = _CHOICE.format(default, for_tools)
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"{source}: the chat templates {_DEFAULT} and {_FOR_TOOLS} have {len(text)} characters together; "
            f"{MAX_TEMPLATE_CHARS} are the most"
        )
    return ChatTemplate(text, source, is_plain=False)


def _read_text(path: Path) -> str:
    try:
        return read_text(path, _MAX_FILE_BYTES)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x})"
        ) from None
