"""Grammars of every kind that allow exactly one text. The output is that text, or the error names the text."""

import ctypes
import json
import random
import re
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from pagewire.common.grammars import GrammarCompiler, GrammarError, Matcher
from scheduler_service.serving.checkpoint.tokenizer import IncrementalDecoder, Tokenizer
from testing.grammars.tokenizer_shapes import END, Shape

# Names of tokens, characters that normalizers change, and characters that some tokenizers have no tokens for.
NAMES = ("<think>", "<tool_call>", "</tool_call>", "<repo_name>", "[INST]", "[TOOL_CALLS]", "<|im_end|>", "<0x41>")
TEXTS = ("e\u0301", "é", "ﬁ Å", "FOX", "fox", " a  b ", "日本", "▁", "\n\n", "\u00a0", "\t", "a")


def random_output(compiler: GrammarCompiler, kind: str, text: str, vocab_size: int, rng: random.Random) -> list[int]:
    """Return a random output of a grammar. All allowed tokens are equally likely at each step."""
    matcher, output = compiler.compile(kind, text, (END,)), list[int]()
    while matcher.end_token_id is None:
        assert len(output) < 500
        output.append(rng.choice(allowed_tokens(matcher, vocab_size)))
        matcher.consume(output[-1:])
    return output[:-1]


def allowed_tokens(matcher: Matcher, vocab_size: int) -> list[int]:
    mask_bytes = 4 * -(-vocab_size // 32)
    mask = ctypes.create_string_buffer(mask_bytes)
    matcher.fill_mask(ctypes.addressof(mask), mask_bytes)
    return [i for i in range(vocab_size) if mask.raw[i // 8] >> i % 8 & 1]


def grammars_of(literal: str) -> dict[str, tuple[str, str, str]]:
    """Return a grammar of each kind that allows only `literal`: the kind, the grammar's text, and the
    expected output."""
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


class Speller:
    """A tokenizer of a given shape, with a compiler of grammars for it."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        path = shape.write(folder)
        self._shape = shape
        self._tokenizer = Tokenizer(path)
        made = HuggingFaceTokenizer.from_file(str(path))
        self._vocab_size = made.get_vocab_size()
        self._prompt = made.encode("x").ids
        self._compiler = GrammarCompiler(path.read_text(encoding="utf-8"), self._vocab_size)

    def spell(self, literal: str, rng: random.Random) -> int:
        """Check the output of a grammar of each kind for a text. Return the number of grammars that refused the text by
        name."""
        return sum(not self._spell_as(*grammar, rng) for grammar in grammars_of(literal).items())

    def _spell_as(self, name: str, grammar: tuple[str, str, str], rng: random.Random) -> bool:
        kind, text, expected = grammar
        output = self._output(kind, text, rng)
        if isinstance(output, GrammarError):
            assert not self._shape.spells_all, f"{name} {expected!r}: {output}"
            assert re.search("it has the text .*, but the tokenizer has no tokens for", str(output)), (name, expected)
            return False
        decoder = IncrementalDecoder(self._tokenizer, self._prompt, skip_special_tokens=True)
        found = "".join(decoder.push([token_id]) for token_id in output) + decoder.flush()
        if kind == "json_schema":
            assert json.loads(found) == json.loads(expected), (name, expected, found)
        else:
            assert found == expected, (name, expected, found)
        return True

    def _output(self, kind: str, text: str, rng: random.Random) -> list[int] | GrammarError:
        try:
            return random_output(self._compiler, kind, text, self._vocab_size, rng)
        except GrammarError as error:
            return error
