"""Tokenizers in the shapes that supported model families publish, built on demand with few tokens."""

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["▁", *string.ascii_letters, *string.digits, *string.punctuation, "\n", "é"]
PIECES = ["▁once", "▁fox", "owl", '":▁', '{"', "▁{", "},", "▁12"]


def as_llamas(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with Llama's rules: pieces contain spaces, a space precedes the text, and unknown characters
    are encoded as bytes."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def as_gemmas(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with Gemma's rules: pieces contain spaces, and no space precedes the text."""
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def with_first(normalizer: normalizers.Normalizer, tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with `normalizer` in front of its own normalizer."""
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizer, *own])
    return tokenizer


def unigram(*, has_bytes: bool, characters: Sequence[str] = CHARACTERS) -> Tokenizer:
    vocab = [(token, 0.0) for token in SPECIAL] + [(token, -20.0) for token in BYTES if has_bytes]
    vocab += [(token, -5.0) for token in characters] + [(token, -4.0) for token in PIECES]
    return Tokenizer(models.Unigram(vocab, 0, has_bytes))


def byte_fallback_bpe() -> Tokenizer:
    merges = [("▁", "f"), ("▁f", "o"), ("▁fo", "x"), ('"', ":"), ('":', "▁"), ("▁", '"'), ("▁", "{")]
    tokens = [*SPECIAL, *BYTES, *CHARACTERS, *("".join(merge) for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def byte_level(alphabet: Sequence[str] = ()) -> Tokenizer:
    """Return a byte-level BPE tokenizer. `alphabet`: the characters that stand for bytes, by default all of them."""
    letters = sorted(alphabet or pre_tokenizers.ByteLevel.alphabet())
    merges = [("f", "o"), ("fo", "x"), ("<", "t"), ("e", "Ì"), ("Ġ", "a")]
    merges = [merge for merge in merges if {*merge} <= {*letters, "fo"}]
    tokens = [*SPECIAL, *letters, *("".join(merge) for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """A recipe for a tokenizer.

    `shown` and `special` are tokens to add. `spells_all`: the tokenizer has enough bytes to spell every text.
    """

    make: Callable[[], Tokenizer]
    shown: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    spells_all: bool = True

    def write(self, folder: Path) -> Path:
        """Write the tokenizer.json to a folder and return its path."""
        tokenizer = self.make()
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in self.shown])
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in self.special])
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"


_LOWER = [character for character in CHARACTERS if not character.isupper()]
_ASCII = [each for each in pre_tokenizers.ByteLevel.alphabet() if each in string.printable or each in "ĠĊ"]
_CHAT = ("<|im_start|>", "<|im_end|>")
SHAPES: dict[str, Shape] = {
    "Llama 2": Shape(lambda: as_llamas(byte_fallback_bpe())),
    "Mistral 7B v0.3": Shape(
        lambda: as_llamas(byte_fallback_bpe()), special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
    ),
    "Phi-3": Shape(lambda: as_llamas(byte_fallback_bpe()), special=("<|end|>", "<|assistant|>")),
    "ALBERT with bytes": Shape(
        lambda: with_first(
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), as_llamas(unigram(has_bytes=True))
        ),
    ),
    "Gemma 3": Shape(
        lambda: as_gemmas(byte_fallback_bpe()), ("<table>", "\n\n", "▁▁"), ("<start_of_turn>", "<end_of_turn>")
    ),
    "Qwen 3": Shape(
        lambda: with_first(normalizers.NFC(), byte_level()),
        ("<tool_call>", "</tool_call>", "<think>", "</think>", "<repo_name>"),
        _CHAT,
    ),
    "Llama 3": Shape(byte_level, special=("<|begin_of_text|>", "<|eot_id|>", "<|python_tag|>")),
    "DeepSeek R1": Shape(
        lambda: with_first(normalizers.Sequence([]), byte_level()),
        ("<think>", "</think>", "<｜User｜>", "<｜tool▁calls▁begin｜>"),
        ("<｜end▁of▁sentence｜>",),
    ),
    "GPT-NeoX": Shape(lambda: with_first(normalizers.NFC(), byte_level()), ("  ", "    "), ("<|padding|>",)),
    "StarCoder 2": Shape(byte_level, special=("<repo_name>", "<file_sep>", "<|endoftext|>")),
    "byte level, NFKC, Lowercase": Shape(
        lambda: with_first(
            normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]), byte_level()
        ),
        ("<tool_call>", "[/INST]"),
    ),
    "byte level, NFD, Replace": Shape(
        lambda: with_first(normalizers.Sequence([normalizers.NFD(), normalizers.Replace("a", "b")]), byte_level()),
        ("<tool_call>",),
        ("[TOOL_CALLS]",),
    ),
    "byte level of ASCII": Shape(lambda: byte_level(_ASCII), ("<tool_call>",), ("[TOOL_CALLS]",), spells_all=False),
    "Unigram": Shape(
        lambda: as_llamas(unigram(has_bytes=False)), ("<tool_call>",), ("[TOOL_CALLS]",), spells_all=False
    ),
    "Unigram of lower case, NFKC, Lowercase": Shape(
        lambda: with_first(
            normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
            as_llamas(unigram(has_bytes=False, characters=[each for each in _LOWER if each not in "_[é"])),
        ),
        ("<tool_call>",),
        ("[TOOL_CALLS]",),
        spells_all=False,
    ),
}
