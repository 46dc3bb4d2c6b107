"""Grammars by tokenizers of other kinds than the bundled model's, made on the spot: what is allowed is, once the
scheduler has made text of it, what the grammar says; and those that the library cannot read are refused."""

import ctypes
import json
import random
import re
import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jsonschema
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

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


# Tokens that are called like texts, and tokenizers that change texts: byte-level as of Qwen, Llama 3 and GPT-2,
# and with byte tokens as of Llama 2, Mistral and Gemma.
THINK, CALL, REPO, INST = "<think>", "<tool_call>", "<repo_name>", "[INST]"
SHOWN = [AddedToken(name, special=False, normalized=False) for name in (THINK, CALL, "</tool_call>", "[/INST]")]
HIDDEN = [AddedToken(name, special=True, normalized=False) for name in (REPO, INST)]
NORMALIZERS: dict[str, normalizers.Normalizer | None] = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFD": normalizers.NFD(),
    "NFKC": normalizers.NFKC(),
    "Lowercase": normalizers.Lowercase(),
    "Replace": normalizers.Replace("a", "b"),
    "Sequence": normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()]),
}
LITERALS = [
    THINK,
    f"a{CALL}b",
    f"{REPO} {REPO}",
    f"{INST}x[/INST]",
    "e\u0301",
    "ﬁ Å",
    "FOX",
    " a  b ",
    f"{CALL}e\u0301A",
]


def byte_level(normalizer: normalizers.Normalizer | None) -> HuggingFaceTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("f", "o"), ("fo", "x"), ("<", "t"), ("e", "Ì"), ("Ġ", "a")]
    tokens = [*SPECIAL, *alphabet, *("".join(merge) for merge in merges)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


CHANGING: dict[str, Callable[[], HuggingFaceTokenizer]] = {
    **{f"byte level, {name}": partial(byte_level, normalizer) for name, normalizer in NORMALIZERS.items()},
    "unigram with bytes": SERVED["unigram with bytes"],
    "BPE with bytes": SERVED["BPE with bytes"],
    "BPE with bytes, NFC": lambda: with_first(normalizers.NFC(), as_llamas(byte_fallback_bpe())),
}


def with_first(normalizer: normalizers.Normalizer, tokenizer: HuggingFaceTokenizer) -> HuggingFaceTokenizer:
    tokenizer.normalizer = normalizers.Sequence([normalizer, tokenizer.normalizer])
    return tokenizer


def grammars_of(literal: str) -> dict[str, tuple[str, str, str]]:
    """Of each kind one that allows a text, as a kind, the grammar, and what its output is."""
    quoted, in_json = json.dumps(literal, ensure_ascii=False), json.dumps({literal: literal}, ensure_ascii=False)
    named = {"type": "object", "properties": {literal: {"const": literal}}, "required": [literal]}
    tag = {"type": "tag", "begin": literal, "content": {"type": "const_string", "value": literal}, "end": literal}
    return {
        "regex": ("regex", re.escape(literal), literal),
        "choice": ("choice", json.dumps([literal]), literal),
        "Lark": ("grammar", f"start: {quoted}", literal),
        "GBNF": ("grammar", f"root ::= {quoted}", literal),
        "const": ("json_schema", json.dumps({"const": literal}), quoted),
        "enum": ("json_schema", json.dumps({"enum": [literal]}), quoted),
        "name": ("json_schema", json.dumps(named | {"additionalProperties": False}), in_json),
        "tag": ("structural_tag", json.dumps({"format": tag}), literal * 3),
    }


@pytest.mark.parametrize("name", CHANGING)
async def test_what_the_tokenizer_does_not_give_back_is_made_of_other_tokens(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    made_of = CHANGING[name]()
    path = made(lambda: made_of, tmp_path)
    made_of.add_tokens(SHOWN)
    made_of.add_special_tokens(HIDDEN)
    made_of.save(str(path))
    tokenizer, vocab_size = Tokenizer(path), made_of.get_vocab_size()
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), vocab_size)
    prompt = await tokenizer.encode("x", 100)
    for literal in LITERALS:
        for shape, (kind, text, expected) in grammars_of(literal).items():
            for _ in range(3):
                output = random_output(compiler, kind, text, vocab_size, rng)
                decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=True)
                found = "".join(decoder.push([token_id]) for token_id in output) + decoder.flush()
                if kind == "json_schema":
                    assert json.loads(found) == json.loads(expected), (shape, literal, found)
                else:
                    assert found == expected, (shape, literal, found)


def test_a_tags_own_token_may_be_taken_for_its_text(tmp_path: Path) -> None:
    """Behind free text, at a tag's beginning and end, and where a trigger is the beginning of its name."""
    made_of = byte_level(None)
    path = made(lambda: made_of, tmp_path)
    made_of.add_tokens(SHOWN)
    made_of.save(str(path))
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), made_of.get_vocab_size())
    content = {"type": "json_schema", "json_schema": {"enum": [1]}}
    for end in ("</tool_call>", "\n</tool_call>"):
        tag = {"type": "tag", "begin": f"{CALL}\n", "content": content, "end": end}
        thought = {"type": "tag", "begin": THINK, "content": {"type": "any_text"}, "end": end}
        for form, text in (
            (tag, f"{CALL}\n1{end}"),
            (thought, f"{THINK}ab{end}"),
            ({"type": "triggered_tags", "triggers": [CALL], "tags": [tag]}, f"ab{CALL}\n1{end}c"),
            ({"type": "triggered_tags", "triggers": ["<tool"], "tags": [tag]}, f"ab{CALL}\n1{end}c"),
            ({"type": "triggered_tags", "triggers": [f"{CALL}\n"], "tags": [tag]}, f"ab{CALL}\n1{end}{CALL}\n1{end}"),
        ):
            matcher = compiler.compile("structural_tag", json.dumps({"format": form}), (END,))
            token_ids = made_of.encode(text, add_special_tokens=False).ids
            assert made_of.token_to_id("</tool_call>") in token_ids
            matcher.copy().consume([*token_ids, END])
            parts = re.split(r"(?<=[<>])", text)
            pieces = [token for part in parts for token in made_of.encode(part, add_special_tokens=False).ids]
            assert made_of.token_to_id("</tool_call>") not in pieces
            matcher.copy().consume([*pieces, END])
            wrong = text.replace("1", "2").replace(THINK, CALL)
            with pytest.raises(GrammarError):
                matcher.copy().consume([*made_of.encode(wrong, add_special_tokens=False).ids, END])
