"""Applies the settings of the other tokenizer files to a tokenizer.json."""

import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.common.gguf.model_file import is_whole, shown, unserved
from pagewire.common.gguf.tokenizer_files.classes import Parts
from pagewire.common.gguf.tokenizer_files.settings import DeclaredToken, Token, TokenizerSettings, token_of

_MODEL = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "dropout", "continuing_subword_prefix")
_OF_OFFSETS = "trim_offsets"
_BYTE_LEVEL = "ByteLevel"  # a decoder of this type has no options with an effect
# post-processors that add nothing unless they have special tokens.
_ADDING_NOTHING = (_BYTE_LEVEL, "TemplateProcessing")


@dataclass(frozen=True, slots=True)
class TokenizerChanges:
    """The changes to a tokenizer.json that the other tokenizer files of a model require. `apply` first replaces some
    parts of the tokenizer.json, and then adds tokens, in order.
    """

    parts: Parts | None  # None: all parts stay
    tokens: tuple[DeclaredToken, ...]
    again: tuple[DeclaredToken, ...]  # tokens to add a second time; the last addition of a token counts
    first: str | None  # a token to put before prompts, as the only token around them
    ids: tuple[tuple[str, int], ...]  # the tokens to which the files assign ids, with these ids

    def key(self) -> bytes:
        """Return bytes that identify the changes to a tokenizer.json. Equal changes have equal bytes."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def apply(self, document: Mapping[str, Any], path: Path) -> str:
        """Apply the changes to a parsed tokenizer.json, and return the text of the changed tokenizer.json. Raises
        ValueError if the result is not a valid tokenizer.
        """
        # Import here: commands that only compare files do not need the library.
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.processors import TemplateProcessing

        if self.parts is not None:
            document = _rebuilt(document, self.parts, path)
        try:
            tokenizer = Tokenizer.from_str(json.dumps(document))
            for tokens in (self.tokens, self.again):
                tokenizer.add_tokens([AddedToken(**asdict(token)) for token in tokens])
            if self.first is not None:
                bos = (self.first, tokenizer.token_to_id(self.first))
                single, pair = f"{self.first}:0 $A:0", f"{self.first}:0 $A:0 {self.first}:1 $B:1"
                tokenizer.post_processor = TemplateProcessing(single, pair, [bos])
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        added = tokenizer.get_added_tokens_decoder()
        self._check_ids({token.content: token_id for token_id, token in added.items()}, path)
        return str(tokenizer.to_str())

    def _check_ids(self, found: Mapping[str, int], path: Path) -> None:
        for text, token_id in self.ids:
            if found.get(text) != token_id:
                has = f"loading them gives it the id {found[text]}" if text in found else "the tokenizer class omits it"
                raise ValueError(
                    f"{path}: the tokenizer files give the token {shown(text)} the id {token_id}, but {has}; if "
                    "tokenizer.json is right, set tokenizer_class in tokenizer_config.json to "
                    "PreTrainedTokenizerFast and remove added_tokens_decoder"
                )


def changes_of(settings: TokenizerSettings, document: Mapping[str, Any], path: Path) -> TokenizerChanges | None:
    """Compare a tokenizer.json with the settings in the other tokenizer files. Return the changes to make, or None if
    the other files change nothing. Raises ValueError if an entry of tokenizer.json is invalid.
    """
    kind, own = settings.kind, dict(_own(document, path))
    declared = {**settings.declared, **(own if settings.takes_own else {})}
    added: list[Token] = [declared[token_id] for token_id in sorted(declared)]
    present = () if kind.parts else own.values()
    texts = {str(token) for token in (*present, *added)}
    special = (*settings.named.values(), *settings.extra)
    added += dict.fromkeys(token for token in special if str(token) not in texts)
    names = set(settings.texts().values())
    tokens = [_with_properties(token, names) for token in added if str(token)]
    # As in the tokenizers library, a text that has once been special is always removed from decoded texts.
    always = {token.content for token in (*present, *tokens) if token.special}
    tokens = [replace(token, special=token.content in always) for token in tokens]
    again = [_with_properties(text, names) for text in dict.fromkeys(map(str, special)) if text]
    parts, with_ids = None, settings.declared
    if kind.parts is not None:
        parts = kind.parts(settings.options, settings.texts().get("unk_token"))
        parts["post_processor"] = document.get("post_processor") if kind.keeps_post_processor else None
        with_ids = {**own, **with_ids}
    ids = tuple((token.content, token_id) for token_id, token in with_ids.items() if token.content)
    first = settings.texts().get("bos_token") if kind.adds_bos else None
    changes = TokenizerChanges(parts, tuple(tokens), tuple(again) if kind.adds_special else (), first, ids)
    return changes if _have_effect(changes, document, own) else None


def _own(document: Mapping[str, Any], path: Path) -> Iterator[tuple[int, DeclaredToken]]:
    """Yield the added tokens in a parsed tokenizer.json with their ids. Raises ValueError for an invalid entry."""
    entries = document.get("added_tokens") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not is_whole(entry.get("id")):
            raise unserved(path, "added_tokens", entry, "a list of tokens with ids")
        yield entry["id"], _with_properties(token_of(entry, path, "added_tokens"), ())


def _with_properties(token: Token, names: Container[str]) -> DeclaredToken:
    """Return a token of a tokenizer with all its properties set. The token becomes special if it was given as a text
    without properties, or if its text is in `names`.
    """
    if isinstance(token, str):
        token = DeclaredToken(token, special=True)
    special = token.special or token.content in names
    return replace(token, special=special, normalized=not special if token.normalized is None else token.normalized)


def _have_effect(changes: TokenizerChanges, document: Mapping[str, Any], own: Mapping[int, DeclaredToken]) -> bool:
    """Return whether changes to a tokenizer.json have any effect. `own` has the added tokens of
    tokenizer.json by id.
    """
    by_text = {token.content: token for token in own.values()}
    if any(by_text.get(token.content) != token for token in (*changes.tokens, *changes.again)):
        return True
    own_ids = {token.content: token_id for token_id, token in own.items()}
    if changes.first is not None or any(own_ids.get(text) != token_id for text, token_id in changes.ids):
        return True
    if changes.parts is None:
        return False
    return by_text.keys() > {token.content for token in changes.tokens} or any(
        _comparable(name, part) != _comparable(name, document.get(name)) for name, part in changes.parts.items()
    )


def _comparable(name: str, part: Any) -> Any:
    """Return a copy of a part of a tokenizer.json for a comparison. The copy lacks the options that have no effect."""
    if isinstance(part, list):
        return [_comparable(name, inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if name == "model":
        return {key: part.get(key) or None for key in _MODEL}
    if name == "post_processor" and not part.get("special_tokens") and part.get("type") in _ADDING_NOTHING:
        return None
    if name == "decoder" and part.get("type") == _BYTE_LEVEL:
        return _BYTE_LEVEL
    return {key: _comparable(name, value) for key, value in part.items() if key != _OF_OFFSETS}


def _rebuilt(document: Mapping[str, Any], parts: Parts, path: Path) -> dict[str, Any]:
    """Return a copy of a tokenizer.json that keeps only its vocabulary and merges. All other parts come from `parts`,
    and the added tokens are removed. Raises ValueError if the tokenizer's model is not BPE.
    """
    model = document["model"]
    if not isinstance(model.get("vocab"), dict) or "merges" not in model:
        raise ValueError(
            f"{path}: its model is not BPE, which the tokenizer_class in tokenizer_config.json requires; set "
            "it to PreTrainedTokenizerFast to use tokenizer.json as it is"
        )
    given = {name: model[name] for name in ("vocab", "merges")}
    return {**document, **parts, "added_tokens": [], "model": {**parts["model"], **given}}
