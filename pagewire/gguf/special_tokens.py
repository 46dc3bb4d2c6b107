"""The special tokens of a GGUF file: those that it names by id, and those that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.gguf.file import GgufFile
from pagewire.gguf.metadata import Metadata

# The names of tokens in checkpoints, by those here.
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# Tokens that end a turn by their text, where a file names one end alone. After llama.cpp, which reads all of them so.
_ENDS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    )
)
_CONTROL = 3  # of token types
# What llama.cpp takes a SentencePiece vocabulary to mean that names none.
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    by_name: Mapping[str, int]  # "bos", "eos", "unk" and "pad", as far as there are such
    ends: tuple[int, ...]
    tokens: list[str]

    @staticmethod
    def of(file: GgufFile) -> "SpecialTokens":
        """Raises GgufError for an id that no token has."""
        keys = Metadata(file, "tokenizer.ggml.")
        tokens = keys.texts("tokens")
        defaults = _SENTENCEPIECE_DEFAULTS if keys.text("model") == "llama" else {}
        by_name = {}
        for key, name in _NAMES.items():
            token_id = _token_id(keys, key, len(tokens))
            if token_id is None and defaults.get(key, len(tokens)) < len(tokens):
                token_id = defaults[key]
            if token_id is not None:
                by_name[name] = token_id
        ends = {_token_id(keys, key, len(tokens)) for key in ("eot", "eom")} | {by_name.get("eos")}
        types = keys.numbers("token_type", len(tokens)) or ()
        ends |= {
            token_id
            for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
            if token_type == _CONTROL and token in _ENDS
        }
        return SpecialTokens(by_name, tuple(sorted(token_id for token_id in ends if token_id is not None)), tokens)

    def ids(self) -> dict[str, int | list[int]]:
        """Return the ids, under the names that config.json has for them."""
        found: dict[str, int | list[int]] = {
            f"{name}_token_id": self.by_name[name] for name in ("bos", "pad") if name in self.by_name
        }
        return {**found, "eos_token_id": list(self.ends)}

    def texts(self) -> dict[str, str]:
        """Return the texts, under the names that tokenizer_config.json has for them."""
        return {f"{name}_token": self.tokens[token_id] for name, token_id in self.by_name.items()}


def _token_id(keys: Metadata, name: str, num_tokens: int) -> int | None:
    key = f"{name}_token_id"
    if not keys.has(key):
        return None
    token_id = keys.whole(key)
    if token_id >= num_tokens:
        raise keys.error(key, f"the id of one of {num_tokens} tokens")
    return token_id
