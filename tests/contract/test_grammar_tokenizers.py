"""Grammars by tokenizers of other kinds than the bundled model's, made on the spot: what is allowed is, once the
scheduler has made text of it, what the grammar says; and those that the library cannot read are refused."""

import ctypes
import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagewire.grammars import GrammarCompiler, GrammarError
from scheduler_service.serving.tokenizer import IncrementalDecoder, Tokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
END = 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = ["▁", *string.ascii_letters, *string.digits, *string.punctuation, "\n", "é"]
PIECES = ["▁once", "▁fox", "owl", '":▁', '{"', "▁{", "},", "▁12"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


def as_llamas(tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    """Spaces are part of a piece, one stands before a text, and bytes stand for what is in no piece."""
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram(*, has_bytes: bool) -> HuggingFaceTokenizer:
    vocab = [(token, 0.0) for token in SPECIAL] + [(token, -20.0) for token in BYTES if has_bytes]
    vocab += [(token, -5.0) for token in CHARACTERS] + [(token, -4.0) for token in PIECES]
    return HuggingFaceTokenizer(models.Unigram(vocab, 0, has_bytes))


def byte_fallback_bpe() -> HuggingFaceTokenizer:
    merges = [("▁", "f"), ("▁f", "o"), ("▁fo", "x"), ('"', ":"), ('":', "▁"), ("▁", '"'), ("▁", "{")]
    tokens = [*SPECIAL, *BYTES, *CHARACTERS, *("".join(merge) for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return HuggingFaceTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )


def t5() -> HuggingFaceTokenizer:
    tokenizer = unigram(has_bytes=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def word_piece() -> HuggingFaceTokenizer:
    tokens = [*SPECIAL, *CHARACTERS, *(f"##{token}" for token in CHARACTERS)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = HuggingFaceTokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


SERVED: dict[str, Callable[[], HuggingFaceTokenizer]] = {
    "unigram with bytes": lambda: as_llamas(unigram(has_bytes=True)),
    "unigram": lambda: as_llamas(unigram(has_bytes=False)),
    "BPE with bytes": lambda: as_llamas(byte_fallback_bpe()),
}


def made(make: Callable[[], HuggingFaceTokenizer], folder: Path) -> Path:
    tokenizer = make()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def random_output(compiler: GrammarCompiler, kind: str, text: str, vocab_size: int, rng: random.Random) -> list[int]:
    """Any output of a grammar: each token is as likely as every other one that is allowed."""
    mask_bytes = 4 * -(-vocab_size // 32)
    mask = ctypes.create_string_buffer(mask_bytes)
    matcher, output = compiler.compile(kind, text, (END,)), list[int]()
    while matcher.end_token_id is None:
        assert len(output) < 500
        matcher.fill_mask(ctypes.addressof(mask), mask_bytes)
        output.append(rng.choice([i for i in range(vocab_size) if mask.raw[i // 8] >> i % 8 & 1]))
        matcher.consume(output[-1:])
    return output[:-1]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("seed", range(3))
async def test_outputs_match_once_they_are_text(name: str, seed: int, tmp_path: Path) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    path = made(SERVED[name], tmp_path)
    tokenizer = Tokenizer(path)
    vocab_size = HuggingFaceTokenizer.from_file(str(path)).get_vocab_size()
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), vocab_size)
    prompt = await tokenizer.encode("once upon a fox", 100)

    def decoded(kind: str, text: str) -> str:
        output = random_output(compiler, kind, text, vocab_size, rng)
        decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=True)
        return "".join(decoder.push([token_id]) for token_id in output) + decoder.flush()

    for _ in range(30):
        jsonschema.validate(json.loads(decoded("json_schema", json.dumps(SCHEMA))), SCHEMA)
    for pattern in (r" ?[a-z ]{5}é?", r" fox( owl){2}", r"fox\n+[{}]"):
        assert re.fullmatch(pattern, decoded("regex", pattern))


@pytest.mark.parametrize("make", [t5, word_piece])
def test_what_the_library_cannot_read_is_refused_in_its_words(
    make: Callable[[], HuggingFaceTokenizer], tmp_path: Path
) -> None:
    path = made(make, tmp_path)
    with pytest.raises(GrammarError, match=r"can't determine decoder type: .*(Metaspace|WordPiece)"):
        GrammarCompiler(path.read_text(encoding="utf-8"), 1000).compile("regex", "a", (END,))
