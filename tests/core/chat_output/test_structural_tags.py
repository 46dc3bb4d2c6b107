"""Structural tags that constrain outputs to valid calls, with a tokenizer that has a token for each tag of a format."""

import itertools
import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pagewire.common.chat.chat_output import Arguments, CallStart
from pagewire.common.grammars import GrammarCompiler, GrammarError
from testing.chat_output.spellings import SPELLINGS, Call
from testing.chat_output.splitting import Functions, parts_of
from testing.grammars.spelled import allowed_tokens

END = 256
PROPERTIES: dict[str, object] = {
    "text": {"type": "string", "enum": ["a b", "c"]},
    "flag": {"type": "boolean"},
    "any": {"type": "string", "maxLength": 9},
    "data": {"type": "object", "properties": {"x": {"enum": [1, None]}}, "additionalProperties": False},
}
FUNCTIONS: Functions = {
    name: {"type": "object", "properties": PROPERTIES, "required": ["flag", "text"], "additionalProperties": False}
    for name in ("f", "get_weather")
}
CALLS = [
    Call("f", {"text": "c", "flag": True, "any": "x: 1", "data": {}}),
    Call("get_weather", {"text": "a b", "flag": False}),
]
BAD_CALLS = [Call("g", CALLS[0].arguments), Call("f", {"text": "d", "flag": True}), Call("f", {"text": "c"})]


SHORT: Functions = {
    "f": {
        "type": "object",
        "properties": {key: PROPERTIES[key] for key in ("flag", "text", "data")},
        "required": ["flag"],
    }
}
SEED = 5


class Constraint:
    def __init__(
        self, name: str, functions: Functions = FUNCTIONS, *, prompt: str = "", thinks: bool = False, **wish: Any
    ) -> None:
        chat_format = SPELLINGS[name].chat_format
        if not thinks:
            chat_format = chat_format._replace(thinking=None)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        tags = ["<end>", *chat_format.tags(FUNCTIONS)]
        self.tokenizer.add_special_tokens([AddedToken(tag, normalized=False) for tag in tags])
        self.num_tokens = self.tokenizer.get_vocab_size()
        compiler = GrammarCompiler(self.tokenizer.to_str(), self.num_tokens)
        self.matcher = compiler.compile(
            "structural_tag", json.dumps(chat_format.structural_tag(functions, prompt, **wish)), (END,)
        )

    def allows(self, text: str) -> bool:
        return self.allows_tokens([*self.tokenizer.encode(text).ids, END])

    def allows_tokens(self, token_ids: list[int]) -> bool:
        try:
            self.matcher.copy().consume(token_ids)
        except GrammarError:
            return False
        return True

    def follows(self, text: str) -> set[str]:
        """Return the tokens that may follow `text`."""
        matcher = self.matcher.copy()
        matcher.consume(self.tokenizer.encode(text).ids)
        return {self.tokenizer.id_to_token(token_id) for token_id in allowed_tokens(matcher, self.num_tokens)}

    def draw(self, drawn: random.Random) -> str:
        """Generate a random output, which ends as soon as the grammar permits."""
        matcher, output = self.matcher.copy(), list[int]()
        while matcher.end_token_id is None:
            allowed = allowed_tokens(matcher, self.num_tokens)
            output.append(END if END in allowed else drawn.choice(allowed))
            matcher.consume(output[-1:])
        text: str = self.tokenizer.decode(output[:-1], skip_special_tokens=False)
        return text


def spelled(name: str, calls: list[Call]) -> str:
    spelling = SPELLINGS[name]
    return (spelling.spell_first or spelling.spell)(calls).strip()


@pytest.mark.parametrize("name", SPELLINGS)
def test_calls_are_allowed_as_models_spell_them(name: str) -> None:
    required = Constraint(name, is_required=True, is_parallel=True)
    free = Constraint(name, is_required=False, is_parallel=True)
    for call in CALLS:
        assert required.allows(spelled(name, [call])), call
        assert free.allows(spelled(name, [call])), call
    for call in BAD_CALLS:
        assert not required.allows(spelled(name, [call])), call
        assert not free.allows(spelled(name, [call])), call
    text = f"{SPELLINGS[name].before_text}Hi"
    assert free.allows(text)
    assert not required.allows(text)


@pytest.mark.parametrize("name", SPELLINGS)
def test_text_without_calls_matches_the_requested_format(name: str) -> None:
    text = {"type": "json_schema", "json_schema": {"type": "array", "items": {"enum": [1, 2]}}}
    begin = "<|channel|>final<|message|>" if name == "harmony" else ""
    constraint = Constraint(name, text=text)
    for call in CALLS:
        assert constraint.allows(spelled(name, [call])), call
    for call in BAD_CALLS:
        assert not constraint.allows(spelled(name, [call])), call
    assert constraint.allows(f"{begin}[1, 2]")
    for bad in ("[3]", "Hi", f"[1]{spelled(name, CALLS[:1])}"):
        assert not constraint.allows(f"{begin}{bad}"), bad
    required = Constraint(name, text=text, is_required=True)
    assert required.allows(spelled(name, CALLS[:1]))
    assert not required.allows(f"{begin}[1]")
    alone = Constraint(name, {}, text=text)
    assert alone.allows(f"{begin}[1]")
    assert not alone.allows(f"{begin}[3]")


@pytest.mark.parametrize("name", SPELLINGS)
def test_permitted_outputs_are_valid_calls(name: str) -> None:
    constraint, drawn = Constraint(name, SHORT, is_required=True, is_parallel=False), random.Random(SEED)
    for _ in range(5):
        text = constraint.draw(drawn)
        parts = parts_of(SPELLINGS[name].chat_format, SHORT, "", [text])
        parts = [part for part in parts if isinstance(part, CallStart | Arguments)]
        assert len(parts) == 2, text
        start, arguments = parts
        assert start == CallStart("f"), text
        assert isinstance(arguments, Arguments), text
        found = json.loads(arguments.text)
        assert isinstance(found["flag"], bool), text
        assert found.get("text", "c") in {"a b", "c"}, text
        assert found.get("data", {}) in ({}, {"x": 1}, {"x": None}), text


ODD_SCHEMAS: list[object] = [
    {},
    True,
    None,
    [],
    {"properties": None, "required": "a"},
    {"properties": {"a": True, "b": None, "c": {"type": ["string", 1], "enum": None, "anyOf": 1}}, "required": None},
    {"properties": {"a": {"$ref": "#/properties/a"}, "b": {"$ref": "#/none/x"}, "c": {"const": "x"}}},
]


@pytest.mark.parametrize("name", SPELLINGS)
def test_invalid_schemas_are_left_to_the_grammar_compiler(name: str) -> None:
    spelling = SPELLINGS[name]
    for schema in ODD_SCHEMAS:
        json.dumps(spelling.chat_format.structural_tag({"f": schema}, "", is_required=True, is_parallel=True))
        call = Call("f", {"a": "1", "c": 2})
        functions: Functions = {"f": schema}  # type: ignore[dict-item]
        parts = parts_of(spelling.chat_format, functions, "", [spelled(name, [call])])
        assert parts[0] == CallStart("f")
        assert isinstance(parts[1], Arguments)
        assert json.loads(parts[1].text).keys() == call.arguments.keys()


THOUGHTS = {name: spelling.thinking for name, spelling in SPELLINGS.items() if spelling.thinking} | {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|>")
}


@pytest.mark.parametrize("has_functions", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
@pytest.mark.parametrize("name", THOUGHTS)
def test_reasoning_ends_after_its_budget(name: str, num_tokens: int, has_functions: bool) -> None:
    """Only the end tag may follow the budget's last token, and no further reasoning may begin, even in spelled tags."""
    begin, end = THOUGHTS[name]
    functions = FUNCTIONS if has_functions else {}
    for prompt in ("", begin) if name != "harmony" else ("",):
        constraint = Constraint(name, functions, prompt=prompt, thinks=True, max_reasoning_tokens=num_tokens)
        thought = f"{'' if prompt else begin}{'x' * num_tokens}"
        assert constraint.follows(thought) == {end}
        assert not num_tokens or "x" in constraint.follows(thought[:-1])
        rest = "<|start|>assistant<|channel|>final<|message|>Hi" if name == "harmony" else "\n\nHi"
        assert constraint.allows(f"{thought}{end}{rest}")
        assert not constraint.allows(f"{thought}x{end}{rest}")
        if name != "harmony":
            assert not constraint.allows(f"{thought}{end}{rest}{begin}x{end}")
            spelled_out = [piece for letter in begin for piece in constraint.tokenizer.encode(letter).ids]
            assert not constraint.allows_tokens([*constraint.tokenizer.encode(f"{thought}{end}Hi").ids, *spelled_out])
        if has_functions:
            call = spelled(name, CALLS[:1])
            assert constraint.allows(f"{thought}{end}{'<|start|>assistant' if name == 'harmony' else ''}{call}")


FREE: dict[str, dict[str, Any]] = {
    "any text": {"type": "any_text"},
    "a pattern of anything": {"type": "regex", "pattern": "(?s:.*)"},
    "tags in text": {
        "type": "triggered_tags",
        "triggers": ["<a>"],
        "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}],
    },
}
FREE["one of a sequence"] = {"type": "sequence", "elements": [{"type": "or", "elements": [FREE["any text"]]}]}


@pytest.mark.parametrize("has_functions", [False, True])
@pytest.mark.parametrize("kind", FREE)
@pytest.mark.parametrize("name", [name for name in THOUGHTS if name != "harmony"])
def test_no_text_of_ones_own_evades_the_budget(name: str, kind: str, has_functions: bool) -> None:
    begin, end = THOUGHTS[name]
    functions = FUNCTIONS if has_functions else {}
    constraint = Constraint(name, functions, thinks=True, max_reasoning_tokens=2, text=FREE[kind])
    assert constraint.allows("Hi")
    assert constraint.allows(f"{begin}xx{end}Hi")
    spelled_out = [piece for letter in begin for piece in constraint.tokenizer.encode(letter).ids]
    rest = constraint.tokenizer.encode(f"xxx{end}Hi").ids
    for before in ([], constraint.tokenizer.encode(f"{begin}xx{end}").ids):
        for begun in (constraint.tokenizer.encode(begin).ids, spelled_out):
            assert not constraint.allows_tokens([*before, *begun, *rest, END])


def test_text_before_calls_may_exclude_strings() -> None:
    constraint = Constraint("llama", text={"type": "any_text", "excludes": ["ab"]})
    assert constraint.allows("a b")
    assert not constraint.allows("x ab")


@pytest.mark.parametrize("name", ["hermes", "llama"])
def test_text_with_a_limit_keeps_it_beside_calls(name: str) -> None:
    constraint = Constraint(name, text={"type": "any_text", "max_tokens": 2})
    assert constraint.allows("ab")
    assert not constraint.allows("abc")
    assert constraint.allows(spelled(name, CALLS[:1]))


def test_arguments_are_ordered_and_optional_ones_may_be_missing() -> None:
    properties: dict[str, object] = {key: {"type": "integer"} for key in "abcd"}
    for required in ([], ["a"], ["b"], ["d"], ["b", "d"], list("abcd"), ["z"]):
        constraint = Constraint("pythonic", {"f": {"properties": properties, "required": required}}, is_required=True)
        for num in range(5):
            for keys in itertools.permutations("abcd", num):
                is_legal = list(keys) == sorted(keys) and set(required) - {"z"} <= set(keys)
                assert constraint.allows(f"[f({', '.join(f'{key}=1' for key in keys)})]") == is_legal, (required, keys)
