"""Pre-tokenizers by their names in `tokenizer.ggml.pre`. They split a text before merges are applied.

The converter of llama.cpp finds the name by comparing the output of a published tokenizer. The patterns here are
therefore those in the published tokenizer.json files. llama.cpp's own patterns differ, since its regular expressions
are more limited.
"""

from dataclasses import dataclass
from typing import Any

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED % (_CONTRACTION + '?', _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# llama.cpp's default for files without a name, which are older than the names.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A pre-tokenizer, which splits a text into pieces before the tokenizer applies merges. A pre-tokenizer is a
    sequence of regular expressions. Each pattern splits the pieces that the previous patterns left.
    """

    patterns: tuple[str, ...]
    takes_whole_words: bool = False  # a piece that is a token becomes this token, without merges
    adds_bos: bool = False  # the default if the file has no setting
    is_composed: bool = False  # texts are normalized to Unicode NFC first

    def to_json(self) -> dict[str, Any]:
        """Return the pre-tokenizer in the format of tokenizer.json, as used by the tokenizers library."""
        splits: list[dict[str, Any]] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return {"type": "Sequence", "pretokenizers": [*splits, byte_level]}


PRE_TOKENIZERS = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    "glm4": PreTokenizer((_LLAMA3,), takes_whole_words=True),
    **dict.fromkeys(("qwen2", "megrez"), PreTokenizer((_QWEN2,), is_composed=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,), is_composed=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    "tekken": PreTokenizer((_TEKKEN,), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), PreTokenizer((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "seed-coder": PreTokenizer((_SEED,)),
    "falcon": PreTokenizer(_FALCON),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), PreTokenizer((_BLOOM,))),
}
