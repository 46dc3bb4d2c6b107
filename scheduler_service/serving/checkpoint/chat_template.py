"""The chat template of a checkpoint: which file it is in, and whether it can be used. Routers and clients render it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pagewire.common.chat.chat_template import refusals
from pagewire.common.chat.template_sandbox import MAX_TEMPLATE_CHARS, BudgetExceeded
from pagewire.common.gguf import read_settings, read_text

_FLAG = "--chat-template"
_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # names that transformers selects by itself
_MAX_NAMED = 64
_MAX_FILE_BYTES = 4 * MAX_TEMPLATE_CHARS
_NO_DEFAULT = "{{{{ raise_exception('this model has no default chat template: {}') }}}}"
# An empty text at each border prevents the tags from stripping whitespace of the templates.
_CHOICE = (
    "{{% if tools is not defined or tools is none %}}{{{{ '' }}}}{}{{{{ '' }}}}"
    "{{% else %}}{{{{ '' }}}}{}{{{{ '' }}}}{{% endif %}}"
)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a checkpoint, a Jinja template that turns a conversation into a prompt. Clients may select
    one of the named templates instead."""

    text: str
    source: Path  # the file that contains it
    named: Mapping[str, str]  # by name; empty if the files contain no names
    is_plain: bool  # the files contain this text itself, where routers look for it

    def refusals(self, special_tokens: Mapping[str, str]) -> tuple[str, ...]:
        """Return the kinds of conversation that the chat template cannot render, each with the reason. The method finds
        them by rendering examples. Raise ValueError if rendering takes too many steps."""
        try:
            return tuple(f"{kinds}: {reason}" for kinds, reason in refusals(self.text, special_tokens).items())
        except BudgetExceeded as error:
            raise ValueError(f"{self.source}: the chat template cannot be used: {error}") from None


def read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """Read the chat template of a checkpoint directory. Return None if the checkpoint has no chat template. Raise
    ValueError if a file is invalid.

    The template is in the file chat_template.jinja. If this file does not exist, it is the field chat_template of
    tokenizer_config.json, or else of chat_template.json. The folder additional_chat_templates may contain more
    templates, which are named after their files.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        named = {_DEFAULT: _read_text(path)}
    else:
        path = directory / "tokenizer_config.json"
        named = _named(tokenizer_config, path)
        if not named:
            path = directory / "chat_template.json"
            named = _named(read_settings(path), path)
    named |= _additional(directory / "additional_chat_templates")
    is_plain = path.name != "chat_template.json" and _is_plain(tokenizer_config)
    return _combined(named, path, is_plain=is_plain)


def given_chat_template(given: str) -> ChatTemplate | None:
    """Return the chat template that the option `--chat-template` gives: the path of a Jinja file, or the text of a
    template, which contains a brace. Raise OSError or ValueError if it is neither or invalid."""
    if "{" in given:
        return _combined({_DEFAULT: given}, Path(_FLAG), is_plain=False)
    if not os.path.isfile(given):
        raise ValueError(
            f"{_FLAG} is {given[:100]!r}, which is neither a file nor the text of a Jinja template; give the path of a "
            "Jinja file"
        )
    return _combined({_DEFAULT: _read_text(Path(given))}, Path(given), is_plain=False)


def chat_template_of(tokenizer_config: Mapping[str, Any], source: Path) -> ChatTemplate | None:
    """Return the chat template in the settings of a tokenizer_config.json, or None if the settings contain no template.
    Raise ValueError if the template is invalid."""
    return _combined(_named(tokenizer_config, source), source, is_plain=_is_plain(tokenizer_config))


def _additional(folder: Path) -> dict[str, str]:
    paths = [path for path in islice(folder.glob("*.jinja"), _MAX_NAMED + 1) if path.is_file()]
    if len(paths) > _MAX_NAMED:
        raise ValueError(
            f"{folder} contains more than {_MAX_NAMED} templates, the maximum; remove templates that are not used"
        )
    return {path.stem: _read_text(path) for path in sorted(paths)}


def _is_plain(tokenizer_config: Mapping[str, Any]) -> bool:
    return isinstance(tokenizer_config.get("chat_template"), str | None)


def _named(config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the chat templates in a configuration file, by name. If the file contains a single text, this text is the
    default template. Raise ValueError if the field chat_template is invalid."""
    found = config.get("chat_template")
    if found is None or isinstance(found, str):
        return {} if found is None else {_DEFAULT: found}
    if isinstance(found, dict):
        found = [{"name": name, "template": template} for name, template in found.items()]
    if not isinstance(found, list):
        raise ValueError(f"{path}: chat_template is {type(found).__name__}, but must be a text or a list of templates")
    if len(found) > _MAX_NAMED:
        raise ValueError(f"{path}: chat_template is a list of {len(found)} templates; the maximum is {_MAX_NAMED}")
    for entry in found:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(f"{path}: the list chat_template must contain objects that have a name and a template")
    return {entry["name"]: entry["template"] for entry in found}


def _combined(named: Mapping[str, str], source: Path, *, is_plain: bool) -> ChatTemplate | None:
    """Combine the default chat template and the template for tools into one template. The combined template uses the
    template for tools if the conversation has tools, as transformers does.

    Routers accept only a single template, and clients then need not know the names. Return None if there are no
    templates. Raise ValueError if the templates are too long.
    """
    if not named:
        return None
    text = default = named.get(_DEFAULT, _NO_DEFAULT.format("give tools" if _FOR_TOOLS in named else "name another"))
    if _FOR_TOOLS in named:
        # A template's last newline is not part of it.
        text = _CHOICE.format(*(each.removesuffix("\n").removesuffix("\r") for each in (default, named[_FOR_TOOLS])))
    num_chars = max(len(text), sum(len(name) + len(template) for name, template in named.items()))
    if num_chars > MAX_TEMPLATE_CHARS:
        raise ValueError(
            f"{source}: the chat templates have {num_chars} characters together; the maximum is {MAX_TEMPLATE_CHARS}"
        )
    has_names = named.keys() != {_DEFAULT}
    return ChatTemplate(text, source, named if has_names else {}, is_plain=is_plain and text == named.get(_DEFAULT))


def _read_text(path: Path) -> str:
    try:
        return read_text(path, _MAX_FILE_BYTES)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}: not UTF-8 ({error.reason}, byte 0x{error.object[error.start]:02x})"
        ) from None
