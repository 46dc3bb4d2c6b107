"""How texts are cut before pairs are merged, by the name in `tokenizer.ggml.pre`.

A converter finds the name by comparing what a published tokenizer does, so these are the patterns of the tokenizer.json
files that stand behind the names, not llama.cpp's own, which its regular expressions make it adapt.
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
# Of files without a name, which came before there were names, llama.cpp makes this.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns, each of which cuts what those before it left whole."""

    patterns: tuple[str, ...]
    takes_whole_words: bool = False  # a word that is a token is that token, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say
    is_composed: bool = False  # texts are brought into Unicode's normal form C

    def to_json(self) -> dict[str, Any]:
        """Return it as tokenizer.json has it."""
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
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"),
        PreTokenizer((_LLAMA3,), takes_whole_words=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "megrez"), PreTokenizer((_QWEN2,), is_composed=True)),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan"), PreTokenizer((_QWEN2,))),
    "qwen35": PreTokenizer((_QWEN35,), is_composed=True),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    "tekken": PreTokenizer((_TEKKEN,), takes_whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((_GPT4O,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), PreTokenizer(_DEEPSEEK3)),
    "seed-coder": PreTokenizer((_SEED,)),
}
