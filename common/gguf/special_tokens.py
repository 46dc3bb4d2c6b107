"""The special tokens of a GGUF file: those that it names by id, and those that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewire.common.gguf.file import GgufFile
from pagewire.common.gguf.metadata import Metadata

# The names of tokens in checkpoints, by those here.
_NAMES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
# Tokens that end an answer by their text, whatever their type. After llama.cpp (llama-vocab.cpp), which reads all so.
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
# Those of code models that end an answer too, by the keys that name them and, where no key does, by their text.
_FILL_IN_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A text that ends no answer where the vocabulary has all ends of a set: there it stands between parts of an answer.
_KEPT_WITH: tuple[tuple[str, frozenset[str]], ...] = (
    *(
        ("<|end|>", frozenset((last, call)))  # harmony (gpt-oss), Solar Open
        for last in ("<|return|>", "<|flush|>")
        for call in ("<|call|>", "<|calls|>")
    ),
    ("</s>", frozenset(("<|tool_response>",))),  # Gemma 4
)
# What llama.cpp takes a SentencePiece vocabulary to mean that names none. The 11 that it takes for both ends of a
# byte-level one is Falcon's, and a piece of text in all others.
_SENTENCEPIECE_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    by_name: Mapping[str, int]  # "bos", "eos", "unk" and "pad", as far as there are such
    ends: tuple[int, ...]
    controls: frozenset[int]  # tokens that are of control type by their text, whatever the file says
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
        by_text = _by_text(keys, tokens)
        by_key = {_token_id(keys, key, len(tokens)) for key in ("eot", "eom", *_FILL_IN_ENDS)} | {by_name.get("eos")}
        ends = by_text | {token_id for token_id in by_key if token_id is not None}
        texts = {tokens[token_id] for token_id in ends}
        kept = {text for text, others in _KEPT_WITH if others <= texts}
        ends = {token_id for token_id in ends if tokens[token_id] not in kept}
        return SpecialTokens(by_name, tuple(sorted(ends)), frozenset(by_text), tokens)

    def ids(self) -> dict[str, int | list[int]]:
        """Return the ids, under the names that config.json has for them."""
        found: dict[str, int | list[int]] = {
            f"{name}_token_id": self.by_name[name] for name in ("bos", "pad") if name in self.by_name
        }
        return {**found, "eos_token_id": list(self.ends)}

    def texts(self) -> dict[str, str]:
        """Return the texts, under the names that tokenizer_config.json has for them."""
        return {f"{name}_token": self.tokens[token_id] for name, token_id in self.by_name.items()}


def _by_text(keys: Metadata, tokens: list[str]) -> set[int]:
    """Return the tokens that end an answer by their text."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    found = {ids[text] for text in _ENDS & ids.keys()}
    for key, texts in _FILL_IN_ENDS.items():
        # Of several, llama.cpp takes whichever its table has first; here it is the first of the list.
        text = next((text for text in texts if text in ids), None)
        if text is not None and not keys.has(f"{key}_token_id"):
            found.add(ids[text])
    return found


def _token_id(keys: Metadata, name: str, num_tokens: int) -> int | None:
    key = f"{name}_token_id"
    if not keys.has(key):
        return None
    token_id = keys.whole(key)
    if token_id >= num_tokens:
        raise keys.error(key, f"the id of one of {num_tokens} tokens")
    return token_id
