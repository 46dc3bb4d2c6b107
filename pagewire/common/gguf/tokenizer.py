"""Converts the tokenizer of a GGUF file to a tokenizer.json, and finds its special tokens."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.common.gguf.file import GgufError, GgufFile, Metadata, shown
from pagewire.common.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"  # values of tokenizer.ggml.model
_SPACE = "▁"  # stands for a space in SentencePiece tokens
# Special tokens that keep the white space after them, in models whose other special tokens remove it. Files do not
# contain this property; llama.cpp has a special case for Phi-3, too.
_KEEPING = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# Values of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# The names of special tokens in checkpoint directories, keyed by their names in GGUF files.
_NAMES = {
    **{"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"},
    # Tokens for infilling. The first three keys are in older files, and have no effect if the file has the newer key.
    **{name: name for name in ("prefix", "suffix", "middle", "fim_rep", "fim_sep", "fim_pad")},
    **{"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"},
}
# Texts of tokens that end an answer, whatever their type. The list follows llama.cpp (llama-vocab.cpp).
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    )
)
# Fill-in-the-middle tokens that end an answer, by the keys that name them. If a key is missing, the token is found by
# its text.
_FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A text that does not end an answer if the vocabulary contains the given other texts: it then separates parts of an
# answer.
_KEPT_WITH: tuple[tuple[str, frozenset[str]], ...] = (
    *(
        ("<|end|>", frozenset((last, call)))  # harmony (gpt-oss), Solar Open
        for last in ("<|return|>", "<|flush|>")
        for call in ("<|call|>", "<|calls|>")
    ),
    ("</s>", frozenset(("<|tool_response>",))),  # Gemma 4
)
# llama.cpp's defaults for a SentencePiece vocabulary that names no special tokens. Its default of 11 for byte-level
# vocabularies fits only Falcon; in others, 11 is an ordinary token.
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


def tokenizer_json(file: GgufFile) -> dict[str, Any]:
    """Convert the tokenizer of a GGUF file to the content of a tokenizer.json. Raises GgufError if the tokenizer is
    broken or of an unsupported kind.
    """
    keys = Metadata(file, "tokenizer.ggml.")
    model = keys.text("model")
    if model not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise keys.error("model", f"{_BYTE_LEVEL} (byte-level BPE) or {_SENTENCEPIECE} (SentencePiece BPE)")
    special = SpecialTokens.of(file)
    vocabulary = _Vocabulary.of(keys, special)
    make = _byte_level if model == _BYTE_LEVEL else _sentencepiece
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(vocabulary.added_tokens()),
        **make(keys, vocabulary, special),
    }


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a GGUF file's tokenizer: tokens that the file names by id, such as BOS, and tokens that end
    an answer.
    """

    by_name: Mapping[str, int]  # by "bos", "eos", "unk", "pad" and the names of tokens for infilling
    ends: tuple[int, ...]
    controls: frozenset[int]  # tokens that are control tokens because of their text, whatever their type in the file
    tokens: list[str]

    @staticmethod
    def of(file: GgufFile) -> "SpecialTokens":
        """Read the special tokens of a GGUF file's tokenizer. Raises GgufError for a token id outside of the
        vocabulary.
        """
        keys = Metadata(file, "tokenizer.ggml.")
        tokens = keys.texts("tokens")
        known = {key: token_id for key, token_id in _SENTENCEPIECE_DEFAULTS.items() if token_id < len(tokens)}
        defaults = known if keys.text("model") == _SENTENCEPIECE else {}
        named = ((name, _token_id(keys, key, len(tokens), defaults.get(key))) for key, name in _NAMES.items())
        by_name = {name: token_id for name, token_id in named if token_id is not None}
        by_text = _by_text(keys, tokens)
        by_key = {_token_id(keys, key, len(tokens)) for key in ("eot", "eom", *_FILL_IN_ENDS)} | {by_name.get("eos")}
        ends = by_text | {token_id for token_id in by_key if token_id is not None}
        texts = {tokens[token_id] for token_id in ends}
        kept = {text for text, others in _KEPT_WITH if others <= texts}
        ends = {token_id for token_id in ends if tokens[token_id] not in kept}
        return SpecialTokens(by_name, tuple(sorted(ends)), frozenset(by_text), tokens)

    def ids(self) -> dict[str, int | list[int]]:
        """Return the ids of the tokenizer's special tokens by their keys in config.json, such as "bos_token_id". The
        value of "eos_token_id" is a list of all tokens that end an answer.
        """
        found: dict[str, int | list[int]] = {
            f"{name}_token_id": self.by_name[name] for name in ("bos", "pad") if name in self.by_name
        }
        return {**found, "eos_token_id": list(self.ends)}

    def texts(self) -> dict[str, str]:
        """Return the texts of the tokenizer's special tokens by their keys in tokenizer_config.json, such as
        "bos_token".
        """
        return {f"{name}_token": self.tokens[token_id] for name, token_id in self.by_name.items()}


def _by_text(keys: Metadata, tokens: list[str]) -> set[int]:
    """Return the ids of the tokens in a GGUF file that end an answer because of their text, such as "<|im_end|>"."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found = {ids[text] for text in _ENDS & ids.keys()}
    for key, texts in _FILL_IN_ENDS.items():
        # If several texts exist, llama.cpp chooses the first in its hash table; here the first in the list counts.
        text = next((text for text in texts if text in ids), None)
        if text is not None and not keys.has(f"{key}_token_id"):
            found.add(ids[text])
    return found


def _token_id(keys: Metadata, name: str, num_tokens: int, default: int | None = None) -> int | None:
    key = f"{name}_token_id"
    if not keys.has(key):
        return default
    token_id = keys.whole(key)
    if token_id >= num_tokens:
        raise keys.error(key, f"the id of one of {num_tokens} tokens")
    return token_id


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens of a GGUF file's tokenizer, by id."""

    tokens: list[str]
    types: Sequence[float]
    ids: Mapping[str, int]  # without the padding tokens that only fill up the embedding
    strips_behind: bool  # special tokens remove the white space that follows them

    @staticmethod
    def of(keys: Metadata, special: SpecialTokens) -> "_Vocabulary":
        tokens = keys.texts("tokens")
        embedding = keys.file.tensors.get("token_embd.weight")
        if embedding is not None and embedding.shape[0] != len(tokens):
            raise GgufError(
                f"{keys.file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd.weight has "
                f"{embedding.shape[0]} rows"
            )
        types = list(keys.numbers("token_type", len(tokens)) or [_NORMAL] * len(tokens))
        for token_id in special.controls:
            types[token_id] = _CONTROL
        ids: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if types[token_id] == _UNUSED and token == f"[PAD{token_id}]":
                continue
            if token in ids:
                raise GgufError(
                    f"{keys.file.path}: tokenizer.ggml.tokens has {shown(token)} twice, as {ids[token]} and {token_id}"
                )
            ids[token] = token_id
        is_phi3 = keys.file.metadata.get("general.architecture") == "phi3" and keys.text("model") == _SENTENCEPIECE
        return _Vocabulary(tokens, types, ids, strips_behind=is_phi3)

    def added_tokens(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the tokenizer's added tokens for tokenizer.json. Added tokens are matched in a text
        before all other processing.
        """
        for token_id, token in enumerate(self.tokens):
            if self.types[token_id] in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token:
                yield {
                    "id": token_id,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": self.types[token_id] == _CONTROL and self.strips_behind and token not in _KEEPING,
                    "normalized": False,
                    "special": self.types[token_id] != _USER_DEFINED,
                }


def _byte_level(keys: Metadata, vocabulary: _Vocabulary, special: SpecialTokens) -> dict[str, Any]:
    pre = keys.text("pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise keys.error("pre", f"one of {', '.join(PRE_TOKENIZERS)}")
    pre_tokenizer: PreTokenizer = PRE_TOKENIZERS[pre]
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.is_composed else None,
        "pre_tokenizer": pre_tokenizer.to_json(),
        "post_processor": _post_processor(keys, special, adds_bos=pre_tokenizer.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre_tokenizer.takes_whole_words,
            "vocab": dict(vocabulary.ids),
            "merges": _written_merges(keys, vocabulary.ids),
        },
    }


def _sentencepiece(keys: Metadata, vocabulary: _Vocabulary, special: SpecialTokens) -> dict[str, Any]:
    has_prefix = keys.flag("add_space_prefix", True)
    if keys.flag("remove_extra_whitespaces", False):
        raise keys.error("remove_extra_whitespaces", "false: no other value is supported")
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    merges = _written_merges(keys, vocabulary.ids) if keys.has("merges") else _merges_by_score(keys, vocabulary)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}],
        },
        "pre_tokenizer": None,
        "post_processor": _post_processor(keys, special, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": special.texts().get("unk_token"),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": dict(vocabulary.ids),
            "merges": merges,
        },
    }


def _post_processor(keys: Metadata, special: SpecialTokens, *, adds_bos: bool) -> dict[str, Any] | None:
    """Return the post-processor of a tokenizer.json, which adds BOS and EOS tokens to prompts. Return None if the GGUF
    file's tokenizer adds no token. Raises GgufError if a token to add has no id.
    """
    names = []
    for name, is_default in (("bos", adds_bos), ("eos", False)):
        # The default adds only tokens that the file names.
        if keys.flag(f"add_{name}_token", is_default and name in special.by_name):
            if name not in special.by_name:
                raise keys.error(f"{name}_token_id", f"the id of a token: add_{name}_token is true")
            names.append(name)
    if not names:
        return None
    marks = {name: {"SpecialToken": {"id": special.texts()[f"{name}_token"], "type_id": 0}} for name in names}

    def around(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*([marks["bos"]] if "bos" in marks else []), *texts, *([marks["eos"]] if "eos" in marks else [])]

    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": around([first]),
        "pair": around([first, second]),
        "special_tokens": {
            mark["SpecialToken"]["id"]: {
                "id": mark["SpecialToken"]["id"],
                "ids": [special.by_name[name]],
                "tokens": [mark["SpecialToken"]["id"]],
            }
            for name, mark in marks.items()
        },
    }


def _written_merges(keys: Metadata, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in keys.texts("merges"):
        middle = merge.find(" ", 1)
        left, right = merge[:middle], merge[middle + 1 :]
        if middle < 0 or any(part not in ids for part in (left, right, left + right)):
            raise GgufError(
                f"{keys.file.path}: tokenizer.ggml.merges has {shown(merge)}, which is not two tokens that form a third"
            )
        merges.append((left, right))
    return merges


def _merges_by_score(keys: Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece tokenizer in order of priority. A merge is a pair of tokens. The pair whose
    merged token has the highest score comes first. Between equal scores, as in files converted without scores, the
    lower id comes first.
    """
    scores = keys.numbers("scores", len(vocabulary.tokens))
    if scores is None:
        raise keys.error(
            "scores", "an array of numbers: without tokenizer.ggml.merges, merges are computed from scores"
        )
    found = []
    for token, token_id in vocabulary.ids.items():
        if vocabulary.types[token_id] not in (_NORMAL, _USER_DEFINED, _UNUSED):
            continue
        if not math.isfinite(scores[token_id]):
            raise keys.error("scores", f"finite numbers, but the score of token {shown(token)} is not finite")
        found += [(-scores[token_id], token_id, pair) for pair in _pairs_forming(token, vocabulary.ids)]
    found.sort(key=lambda merge: merge[:2])
    return [pair for _, _, pair in found]


def _pairs_forming(token: str, ids: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    """Return the pairs of vocabulary tokens that concatenate to `token`, in the order of transformers: pairs with a
    longer left half come first.
    """
    return (
        (token[:length], token[length:])
        for length in range(len(token) - 1, 0, -1)
        if token[:length] in ids and token[length:] in ids
    )
