"""Grammars with tokenizers of other kinds than the bundled model's, created in the tests.

Allowed outputs match the grammar after the scheduler has decoded them to text. Tokenizers that the grammar library
cannot read are refused.
"""

import json
import random
import re
import string
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pagewire.common.grammars import GrammarCompiler, GrammarError
from pagewire.common.grammars.literals import literals_of
from pagewire.common.grammars.trial import Trials
from scheduler_service.serving.checkpoint.tokenizer import IncrementalDecoder, Tokenizer
from testing.grammars.spelled import NAMES, TEXTS, Speller, random_output
from testing.grammars.tokenizer_shapes import CHARACTERS, END, SHAPES, SPECIAL, Shape, byte_level, unigram
from testing.seeds import seeded

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}


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


@pytest.mark.parametrize("name", ["Llama 2", "ALBERT with bytes", "Unigram"])
@pytest.mark.parametrize("seed", range(3))
async def test_outputs_match_once_they_are_text(name: str, seed: int, tmp_path: Path) -> None:
    rng = seeded(seed)
    path = SHAPES[name].write(tmp_path)
    tokenizer = Tokenizer(path)
    vocab_size = HuggingFaceTokenizer.from_file(str(path)).get_vocab_size()
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), vocab_size)
    prompt = await tokenizer.encode("once upon a fox", 100, list)

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
    path = Shape(make).write(tmp_path)
    with pytest.raises(GrammarError, match=r"can't determine decoder type: .*(Metaspace|WordPiece)"):
        GrammarCompiler(path.read_text(encoding="utf-8"), 1000).compile("regex", "a", (END,))


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_is_spelled_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    """A grammar of any kind produces a literal exactly, or is refused with the literal in the error.

    Special tokens may have the literal's text, and the tokenizer may encode it differently.
    """
    shape, rng = SHAPES[name], random.Random(name)
    speller = Speller(shape, tmp_path)
    literals = [*shape.shown, *shape.special, *NAMES, *TEXTS, "a<tool_call>b", "[TOOL_CALLS]e\u0301 FOX"]
    num_refused = [speller.spell(literal, rng) for literal in dict.fromkeys(literals)]
    assert any(num_refused) == (not shape.spells_all)


@pytest.mark.parametrize(
    ("kind", "text", "refusal"),
    [
        (
            "regex",
            "fox[日本]",
            "after [1-3] tokens of an output: the tokenizer has no tokens for the text that must come",
        ),
        ("regex", "[日本]", "^the tokenizer has no tokens for the text that must come next$"),
        ("grammar", 'start: X x\nX: /f/\nx: "o" Y\nY: /a/ & /b/', "after 2 tokens .* no tokens for the text"),
        (
            "choice",
            '["fox", "日本 fox"]',
            "it has the text '日本 fox', but the tokenizer has no tokens for '日'; remove",
        ),
    ],
)
def test_a_grammar_with_a_dead_end_is_refused(kind: str, text: str, refusal: str, tmp_path: Path) -> None:
    path = SHAPES["Unigram"].write(tmp_path)
    tokenizer_json = path.read_text(encoding="utf-8")
    trials = Trials(tokenizer_json, HuggingFaceTokenizer.from_str(tokenizer_json).get_vocab_size(), (END,))
    try:
        assert re.search(refusal, trials.run(kind, text, (END,)))
        assert trials.run("regex", "fox", (END,)) == ""
    finally:
        trials.close()


def test_a_tag_takes_a_token_whose_name_no_others_spell(tmp_path: Path) -> None:
    shape = SHAPES["Unigram of lower case, NFKC, Lowercase"]
    compiler = GrammarCompiler(shape.write(tmp_path).read_text(encoding="utf-8"), 1000)
    tag = {"type": "tag", "begin": "a<tool_call>", "content": {"type": "any_text"}, "end": "<tool_call>b"}
    with pytest.raises(GrammarError, match="it has the text '<tool_call>', but the tokenizer has no tokens for '_'"):
        compiler.compile("regex", "<tool_call>", (END,))
    made_of = HuggingFaceTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    a, call, b = map(made_of.token_to_id, ("a", "<tool_call>", "b"))
    matcher = compiler.compile("structural_tag", json.dumps({"format": tag}), (END,))
    matcher.copy().consume([a, call, b, a, call, b, END])
    with pytest.raises(GrammarError):
        matcher.consume([a, made_of.token_to_id("<")])


def test_a_character_is_spelled_by_its_bytes_if_all_have_tokens(tmp_path: Path) -> None:
    path = Shape(lambda: byte_level([*string.ascii_letters, "Ã", "©"])).write(tmp_path)  # the bytes of "é"
    made_of = HuggingFaceTokenizer.from_file(str(path))
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), made_of.get_vocab_size())
    compiler.compile("regex", "é", (END,)).consume([*map(made_of.token_to_id, "Ã©"), END])
    with pytest.raises(GrammarError, match="the tokenizer has no tokens for 'è'"):
        compiler.compile("regex", "è", (END,))


def test_the_texts_of_a_grammar_are_found() -> None:
    """All literal texts of a grammar are found. Classes, ranges and comments are not literals."""
    lark = r"""// "no"
    start: "a\u00e9\"" </no> /b\/(?:cd)?[ef]{2}\d\.\x{41}\t\u00e9(?P<name>g)+/i TAG["h"] // "no"
    TAG: "i"i | "x".."z" # "no"
    x: %json {"properties": {"j": {"const": ["k", 1]}}, "$defs": {"no": {"enum": ["l"]}}, "pattern": "^m$"}
    y: <[5]> | %regex {"substring_chars": "no"}
    """
    found = [(literal.text, literal.is_any_case) for literal in literals_of(lark)]
    texts = [('aé"', False), ("b/", True), ("cd", True), (".A\té", True), ("g", True), ("h", False), ("i", True)]
    assert found == [*texts, ('"j"', False), ("m", False), ('["k",1]', False), ('"l"', False)]


def test_a_tags_own_token_may_be_taken_for_its_text(tmp_path: Path) -> None:
    """A special token may replace its text in a tag: after free text, at the tag's beginning or end, and if a trigger
    is a prefix of the text.
    """
    path = SHAPES["Qwen 3"].write(tmp_path)
    made_of = HuggingFaceTokenizer.from_file(str(path))
    compiler = GrammarCompiler(path.read_text(encoding="utf-8"), made_of.get_vocab_size())
    content = {"type": "json_schema", "json_schema": {"enum": [1]}}
    for end in ("</tool_call>", "\n</tool_call>"):
        tag = {"type": "tag", "begin": "<tool_call>\n", "content": content, "end": end}
        thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": end}
        for form, text in (
            (tag, f"<tool_call>\n1{end}"),
            (thought, f"<think>ab{end}"),
            ({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": [tag]}, f"ab<tool_call>\n1{end}c"),
            ({"type": "triggered_tags", "triggers": ["<tool"], "tags": [tag]}, f"ab<tool_call>\n1{end}c"),
            (
                {"type": "triggered_tags", "triggers": ["<tool_call>\n"], "tags": [tag]},
                f"ab<tool_call>\n1{end}<tool_call>\n1{end}",
            ),
        ):
            matcher = compiler.compile("structural_tag", json.dumps({"format": form}), (END,))
            token_ids = made_of.encode(text, add_special_tokens=False).ids
            assert made_of.token_to_id("</tool_call>") in token_ids
            matcher.copy().consume([*token_ids, END])
            parts = re.split(r"(?<=[<>])", text)
            pieces = [token for part in parts for token in made_of.encode(part, add_special_tokens=False).ids]
            assert made_of.token_to_id("</tool_call>") not in pieces
            matcher.copy().consume([*pieces, END])
            wrong = text.replace("1", "2").replace("<think>", "<tool_call>")
            with pytest.raises(GrammarError):
                matcher.copy().consume([*made_of.encode(wrong, add_special_tokens=False).ids, END])
