"""Reads the tokenizer settings in the files beside tokenizer.json: the class, its options, and tokens.

The files are read in the same order as in transformers, so that each token has the properties that AutoTokenizer gives
it.
"""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.common.gguf.model_file import is_whole, read_settings, unserved
from pagewire.common.gguf.tokenizer_files.classes import PLAIN, TokenizerClass, UnsupportedClassError, class_of

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_STANDARD = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA, _ADDITIONAL, _SPECIFIC = "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"
_DECODER = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_OPTIONS = ("add_prefix_space", "legacy")
# Settings that would change texts or tokens, with the values that have no effect.
_INERT: dict[str, tuple[Any, ...]] = {
    "split_special_tokens": (None, False),
    "fast_tokenizer_files": (None, [], ["tokenizer.json"]),
    "init_inputs": (None, []),
}
_MAX_ID = 1 << 24  # far above any existing vocabulary


@dataclass(frozen=True, slots=True)
class DeclaredToken:
    """An added token of a tokenizer with its options for matching. The tokenizer matches added tokens in a text before
    all other processing.
    """

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: normalized unless the token is special
    special: bool = False

    def __str__(self) -> str:
        return self.content


Token = str | DeclaredToken  # a plain text has no properties


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """The tokenizer settings that a model's files beside tokenizer.json contain."""

    kind: TokenizerClass = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict)
    # Special tokens by the names that chat templates use, in order.
    named: Mapping[str, Token] = field(default_factory=dict)
    extra: tuple[Token, ...] = ()  # further special tokens
    declared: Mapping[int, DeclaredToken] = field(default_factory=dict)  # by the ids that the files assign
    takes_own: bool = True  # the added tokens of tokenizer.json count, too

    def texts(self) -> dict[str, str]:
        """Return the texts of the tokenizer's named special tokens, by names such as "bos_token"."""
        return {name: str(token) for name, token in self.named.items()}


def settings_of(directory: Path, tokenizer_json: str) -> TokenizerSettings:
    """Read the tokenizer settings in the files of a checkpoint directory. Raises ValueError, whose message is one line
    that names the file, for an invalid or unsupported setting.
    """
    path = directory / CONFIG
    config, model = read_settings(path), read_settings(directory / "config.json")
    for name, inert in _INERT.items():
        if config.get(name) not in inert:
            raise unserved(path, name, config[name], f"{json.dumps(inert[-1])}: no other value is supported")
    named = (model.get("model_type"), config.get("tokenizer_class"), model.get("tokenizer_class"))
    model_type, class_name, in_model = (name if isinstance(name, str) else "" for name in named)
    try:
        kind = class_of(model_type, class_name or in_model, tokenizer_json)
    except UnsupportedClassError as error:
        raise ValueError(f"{path}: {error}") from None
    tokens = _by_name(_tokens_in(config, path))
    # As in transformers, the two older files count only if tokenizer_config.json has no list of tokens.
    is_listed = _DECODER in config
    if is_listed:
        declared = _listed(config, path)
    else:
        older = _tokens_in(read_settings(directory / NAMES), directory / NAMES, is_special=True)
        tokens = _merged(tokens, older)
        # As in transformers, tokens that tokenizer_config.json gives as objects do not count here.
        special = {*(token for token in _flat(tokens) if isinstance(token, str)), *map(str, _flat(older))}
        declared = _added(directory / ADDED, special)
    named_tokens, extra = _special(tokens, kind)
    options = {name: config[name] for name in _OPTIONS if name in config}
    for name, value in options.items():
        if not isinstance(value, bool | None):
            raise unserved(path, name, value, "true or false")
    return TokenizerSettings(kind, options, named_tokens, extra, declared, takes_own=not is_listed)


def settings_in(config: Mapping[str, Any], path: Path) -> TokenizerSettings:
    """Return the tokenizer settings of a GGUF file, given the content of its tokenizer_config.json. Raises ValueError
    for an invalid token.
    """
    named, extra = _special(_by_name(_tokens_in(config, path)), PLAIN)
    return TokenizerSettings(named=named, extra=extra)


def without_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a tokenizer_config.json that are neither tokens nor the name of the tokenizer class."""
    keys = {_EXTRA, _ADDITIONAL, _SPECIFIC, _DECODER, "tokenizer_class"}
    return {key: value for key, value in config.items() if key not in keys and not _is_token(key, value)}


def token_of(value: Any, path: Path, key: str, *, is_special: bool = False) -> Token:
    """Convert the value that describes a token in a tokenizer file. Return the text alone, or a `DeclaredToken` for an
    object with options. Raises ValueError for an invalid value.
    """
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
    """Return whether a setting in a tokenizer file specifies a special token, as "bos_token" does. A setting such as
    add_bos_token specifies no token, because its value is a boolean.
    """
    is_named = isinstance(value, str | None) or (isinstance(value, dict) and "content" in value)
    return key.endswith("_token") and is_named


def _tokens_in(values: Mapping[str, Any], path: Path, *, is_special: bool = False) -> dict[str, Any]:
    """Return the special tokens in a tokenizer file by their keys. The value for a key is a token, None, or a list or
    mapping of tokens. Raises ValueError for an invalid value.
    """
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
    """Convert the special tokens in a tokenizer_config.json of any version of transformers to the current keys. Special
    tokens without names become extra tokens. Tokens with non-standard names become model-specific tokens.
    """
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
    """Return the special tokens of tokenizer_config.json, overridden by the special tokens of
    special_tokens_map.json.
    """
    found, extra = {**tokens, **older}, older.get(_EXTRA)
    if isinstance(extra, list):
        had = list(tokens.get(_EXTRA) or ())
        found[_EXTRA] = [*had, *(token for token in extra if token not in set(had))]
    if isinstance(extra, dict):
        found[_SPECIFIC] = {**(found.get(_SPECIFIC) or {}), **found.pop(_EXTRA)}
    return found


def _special(tokens: Mapping[str, Any], kind: TokenizerClass) -> tuple[dict[str, Token], tuple[Token, ...]]:
    """Return the special tokens of a tokenizer as a tuple: the named tokens by name, such as "bos_token", and the
    special tokens without names.
    """
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
    """Yield a tokenizer's special tokens that have standard names, such as "bos_token", and then the special tokens
    without names.
    """
    extra = tokens.get(_EXTRA)
    yield from (tokens[key] for key in _STANDARD if tokens.get(key))
    yield from extra if isinstance(extra, list) else ()


def _listed(config: Mapping[str, Any], path: Path) -> dict[int, DeclaredToken]:
    """Return the tokens in the added_tokens_decoder of a tokenizer_config.json by id. Raises ValueError for an invalid
    entry.
    """
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
    """Return the tokens in an added_tokens.json, which maps texts to ids, by id. Tokens whose text is in `special` are
    special. Raises ValueError for an invalid id.
    """
    found = {}
    for text, token_id in read_settings(path).items():
        if not is_whole(token_id) or not 0 <= token_id < _MAX_ID:
            raise unserved(path, text, token_id, f"the id of a token, from 0 to {_MAX_ID - 1}")
        found[token_id] = DeclaredToken(text, normalized=text not in special, special=text in special)
    return found
