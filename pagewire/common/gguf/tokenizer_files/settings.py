"""What the files beside tokenizer.json say of a tokenizer: its class, its options, and tokens.

They are read in transformers' order, so that a token, and what is said of it, is the one that AutoTokenizer takes.
"""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.common.gguf.model_file import is_whole, read_settings, unserved
from pagewire.common.gguf.tokenizer_files.classes import PLAIN, TokenizerClass, UnservedClassError, class_of

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA, _ADDITIONAL, _SPECIFIC = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_DECODER = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OPTIONS = ("add_prefix_space", "legacy")
# What would change texts or tokens, with the values that change nothing.
_INERT: dict[str, tuple[Any, ...]] = {
    "split_special_tokens": (None, False),
    "fast_tokenizer_files": (None, [], ["tokenizer.json"]),
    "init_inputs": (None, []),
}
_MAX_ID = 1 << 24  # far above any vocabulary there is


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """A token that is found in texts as it is, before anything else is done to them."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: it is, unless it is special
    special: bool = False

    def __str__(self) -> str:
        return self.content


Token = str | DeclaredToken  # of a text alone it is not said how it is found


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    kind: TokenizerClass = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Token] = field(default_factory=dict)  # by the names that a chat template uses, in their order
    extra: tuple[Token, ...] = ()  # further special tokens
    declared: Mapping[int, DeclaredToken] = field(default_factory=dict)  # by the ids that the files give them
    takes_own: bool = True  # those of tokenizer.json count besides

    def texts(self) -> dict[str, str]:
        """Return the special tokens that have a name, as texts."""
        return {name: str(token) for name, token in self.named.items()}


def settings_of(directory: Path, tokenizer_json: str) -> TokenizerSettings:
    """Read the files of a checkpoint directory. Raises ValueError, one line that names the file."""
    path = directory / CONFIG
    config, model = read_settings(path), read_settings(directory / "config.json")
    for name, inert in _INERT.items():
        if config.get(name) not in inert:
            raise unserved(path, name, config[name], f"{json.dumps(inert[-1])}: nothing else is served")
    named = (model.get("model_type"), config.get("tokenizer_class"), model.get("tokenizer_class"))
    model_type, class_name, in_model = (name if isinstance(name, str) else "" for name in named)
    try:
        kind = class_of(model_type, class_name or in_model, tokenizer_json)
    except UnservedClassError as error:
        raise ValueError(f"{path}: {error}") from None
    tokens = _by_name(_tokens_in(config, path))
    # As in transformers, the older two files count where the newer one has no list of tokens.
    is_listed = _DECODER in config
    if is_listed:
        declared = _listed(config, path)
    else:
        older = _tokens_in(read_settings(directory / NAMES), directory / NAMES, is_special=True)
        tokens = _merged(tokens, older)
        # As there, too, what tokenizer_config.json has as an object does not count here.
        special = {*(token for token in _flat(tokens) if isinstance(token, str)), *map(str, _flat(older))}
        declared = _added(directory / ADDED, special)
    named_tokens, extra = _special(tokens, kind)
    options = {name: config[name] for name in _OPTIONS if name in config}
    for name, value in options.items():
        if not isinstance(value, bool | None):
            raise unserved(path, name, value, "true or false")
    return TokenizerSettings(kind, options, named_tokens, extra, declared, takes_own=not is_listed)


def settings_in(config: Mapping[str, Any], path: Path) -> TokenizerSettings:
    """Return what a GGUF file says, as tokenizer_config.json would. Raises ValueError."""
    named, extra = _special(_by_name(_tokens_in(config, path)), PLAIN)
    return TokenizerSettings(named=named, extra=extra)


def without_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a tokenizer_config.json says besides."""
    keys = {_EXTRA, _ADDITIONAL, _SPECIFIC, _DECODER, "tokenizer_class"}
    return {key: value for key, value in config.items() if key not in keys and not _is_token(key, value)}


def token_of(value: Any, path: Path, key: str, *, is_special: bool = False) -> Token:
    """Return a token as a file has it. Raises ValueError."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise unserved(path, key, value, "a text, or an object with its content")
    flags = {name: value[name] for name in _FLAGS if name in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise unserved(path, f"{key}: {name}", flag, "true or false")
    return DeclaredToken(value["content"], **{**flags, **({"special": True} if is_special else {})})


def _is_token(key: str, value: Any) -> bool:
    """Whether a setting names a special token. Of others, such as add_bos_token, the value is no text."""
    is_named = isinstance(value, str | None) or (isinstance(value, dict) and "content" in value)
    return key.endswith("_token") and is_named


def _tokens_in(values: Mapping[str, Any], path: Path, *, is_special: bool = False) -> dict[str, Any]:
    """Return what a file says of special tokens: a token, None, or for some keys a list or mapping of tokens."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _STANDARD or _is_token(key, value):
            found[key] = None if value is None else token_of(value, path, key, is_special=is_special)
        elif key in (_EXTRA, _ADDITIONAL) and isinstance(value, list):
            found[key] = [token_of(token, path, key, is_special=is_special) for token in value]
        elif key in (_EXTRA, _SPECIFIC) and isinstance(value, dict):
            found[key] = {name: token_of(token, path, key, is_special=is_special) for name, token in value.items()}
        elif key in (_EXTRA, _ADDITIONAL, _SPECIFIC):
            if value is not None:
                raise unserved(path, key, value, "a list of tokens, or an object of tokens by name")
            found[key] = None
    return found


def _by_name(tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Bring what a tokenizer_config.json of any time says into the keys of today: special tokens without a name are
    extra ones, and those whose names are not standard are specific to the model."""
    found = dict(tokens)
    if not found.get(_EXTRA) and _ADDITIONAL in found:
        found[_EXTRA] = found.pop(_ADDITIONAL)
    specific = {key: found.pop(key) for key in tokens if key not in _STANDARD and isinstance(tokens[key], str)}
    if isinstance(found.get(_EXTRA), dict):
        specific |= found.pop(_EXTRA)
    if specific:
        found[_SPECIFIC] = specific
    return found


def _merged(tokens: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """Let special_tokens_map.json say anew what tokenizer_config.json says."""
    found, extra = {**tokens, **older}, older.get(_EXTRA)
    if isinstance(extra, list):
        had = list(tokens.get(_EXTRA) or ())
        found[_EXTRA] = [*had, *(token for token in extra if token not in set(had))]
    if isinstance(extra, dict):
        found[_SPECIFIC] = {**(found.get(_SPECIFIC) or {}), **found.pop(_EXTRA)}
    return found


def _special(tokens: Mapping[str, Any], kind: TokenizerClass) -> tuple[dict[str, Token], tuple[Token, ...]]:
    """Return the special tokens that have names, and the others."""
    found = {**kind.tokens, **tokens}
    if kind.extra:
        own = (found[name] for name in kind.extra if found[name] is not None)
        found[_ADDITIONAL] = [*(found.get(_ADDITIONAL) or ()), *own]
    if _EXTRA not in found:
        found[_EXTRA] = found.get(_ADDITIONAL)
    keys = (*_STANDARD, *(key for key in found if key.endswith("_token") and key not in _STANDARD))
    named = {key: found[key] for key in keys if found.get(key) is not None}
    return {**named, **(found.get(_SPECIFIC) or {})}, tuple(found[_EXTRA] or ())


def _flat(tokens: Mapping[str, Any]) -> Iterator[Token]:
    """Yield the tokens under standard names, and those without a name."""
    extra = tokens.get(_EXTRA)
    yield from (tokens[key] for key in _STANDARD if tokens.get(key))
    yield from extra if isinstance(extra, list) else ()


def _listed(config: Mapping[str, Any], path: Path) -> dict[int, DeclaredToken]:
    """Return the tokens of added_tokens_decoder by their ids."""
    listed = config[_DECODER]
    if not isinstance(listed, dict):
        raise unserved(path, _DECODER, listed, "an object of tokens by their ids")
    found = {}
    for name, value in listed.items():
        token = token_of(value, path, _DECODER)
        if not isinstance(token, DeclaredToken) or not (name.isascii() and name.isdecimal() and len(name) < 9):
            raise unserved(path, _DECODER, {name: value}, "an object of tokens by their ids")
        found[int(name)] = token
    return found


def _added(path: Path, special: Container[str]) -> dict[int, DeclaredToken]:
    """Return the tokens of added_tokens.json, which has ids by texts."""
    found = {}
    for text, token_id in read_settings(path).items():
        if not is_whole(token_id) or not 0 <= token_id < _MAX_ID:
            raise unserved(path, text, token_id, f"the id of a token, from 0 to {_MAX_ID - 1}")
        found[token_id] = DeclaredToken(text, normalized=text not in special, special=text in special)
    return found
