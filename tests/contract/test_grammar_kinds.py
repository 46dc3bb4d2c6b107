"""The outputs that each kind of grammar allows, the state of a matcher, and limits on the cost of reading a grammar."""

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagewire.common.grammars import (
    GrammarCache,
    GrammarCompiler,
    GrammarError,
    GrammarLimitError,
    MaskJob,
    MaskQueue,
    Matcher,
    trial,
)
from pagewire.common.grammars.structural_tag import _FIELDS, structural_tag_to_lark
from pagewire.common.grammars.trial import TOO_MUCH, Trials
from testing.grammars.hostile import HOSTILE
from testing.seeds import seeded
from testing.sources import ROOT

TOKENIZER = ROOT / "models" / "storyteller" / "tokenizer.json"
VOCAB_SIZE = 1024 + 40  # larger ids are padding
END, OTHER_END = 0, 2
MASK_BYTES = 4 * -(-VOCAB_SIZE // 32)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.read_text(encoding="utf-8"), VOCAB_SIZE)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def allowed(matcher: Matcher) -> list[int]:
    mask = ctypes.create_string_buffer(MASK_BYTES)
    matcher.fill_mask(ctypes.addressof(mask), MASK_BYTES)
    return bits(mask.raw)


def bits(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def tag(begin: str, end: str, schema: object = POINT) -> dict[str, object]:
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def of_format(form: dict[str, object]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


ONE_DIGIT = {"type": "regex", "pattern": "[0-9]/"}
CALLS = of_format({"type": "triggered_tags", "triggers": ["<fn="], "tags": [tag("<fn=a>", "</fn>"), tag("<fn=b>", "")]})
LIST = of_format({"type": "tags_with_separator", "tags": [tag("<a>", "</a>")], "separator": ",", "at_least_one": True})
THOUGHT = of_format(
    {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {
                "type": "or",
                "elements": [{"type": "const_string", "value": "ok "}, ONE_DIGIT],
            },
            {"type": "json_schema", "json_schema": POINT},
        ],
    }
)
OLDER = json.dumps({"structures": [{"begin": "<fn=a>", "schema": POINT, "end": "</fn>"}], "triggers": ["<fn="]})
# Kind, text, matching outputs, and outputs that do not match.
KINDS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "json_schema": ("json_schema", json.dumps(POINT), ('{"x":1}', '{"x": -20}'), ('{"x":"1"}', "{}", '{"x":  1}')),
    "spaces as a schema says": (
        "json_schema",
        json.dumps(POINT | {"x-guidance": {"whitespace_flexible": False}}),
        ('{"x":1}',),
        ('{"x": 1}',),
    ),
    "spaces as is usual, and another option": (
        "json_schema",
        json.dumps(POINT | {"x-guidance": {"item_separator": ";"}}),
        ('{"x":1}', '{"x": 1}'),
        ('{"x":  1}',),
    ),
    "the schema true": ("json_schema", "true", ("{}", "[1, null]", '"a"', "-1.5", '{"a": [{}]}'), ("", "[1,  2]", "a")),
    "schemas in schemas that are true or false": (
        "json_schema",
        '{"type": "object", "properties": {"a": true, "b": false}, "additionalProperties": false}',
        ("{}", '{"a": [1]}'),
        ('{"b": 1}', '{"c": 1}'),
    ),
    "json_object": ("json_object", "", ("{}", '{"a": [1, {"b": null}]}'), ("[]", "1", '{"a" 1}')),
    "regex": ("regex", "[a-c]+x?", ("abc", "ax"), ("x", "axa", "ab ")),
    "regex with anchors": ("regex", "^ab$", ("ab",), ("a", "abb")),
    "choice": ("choice", json.dumps(["yes", "yes, sir", 'a "b" \\ é']), ("yes", "yes, sir", 'a "b" \\ é'), ("y", "no")),
    "lark": ("grammar", 'start: "hello " /[a-z]{3}/', ("hello abc",), ("hello ab", "hi abc")),
    "ebnf": ("grammar", 'root ::= "a" [0-9]+ ("x" | "y")?', ("a12", "a1x"), ("b", "ax", "a1xy")),
    "tags behind triggers": (
        "structural_tag",
        CALLS,
        ("hello", 'hi <fn=a>{"x":1}</fn> there', '<fn=b>{"x":1}<fn=a>{"x":2}</fn>'),
        ("<fn=c>", '<fn=a>{"x":"s"}</fn>', '<fn=a>{"x":1}', '<fn=a>{"x":  1}</fn>', '<fn=a>{ \n"x":1}</fn>'),
    ),
    "spaces in a tag as its schema says": (
        "structural_tag",
        of_format(tag("<a>", "</a>", POINT | {"x-guidance": {"whitespace_pattern": "[ ]{2}"}})),
        ('<a>{  "x":  1  }</a>',),
        ('<a>{"x": 1}</a>',),
    ),
    "slashes of a tag, and what its text has to escape": (
        "structural_tag",
        of_format(
            {"type": "tag", "begin": "\x7f", "content": {"type": "regex", "pattern": r"a/\/[/]\\"}, "end": "\n😀"}
        ),
        ("\x7fa///\\\n😀",),
        ("\x7fa///\n😀", "\x7fa//\\\n😀"),
    ),
    "what asks for nothing besides": (
        "structural_tag",
        of_format({"type": "json_schema", "json_schema": POINT, "style": "json", "excludes": [], "name": None}),
        ('{"x":1}',),
        ("{}",),
    ),
    "a tag with the schema true": (
        "structural_tag",
        of_format(tag("<a>", "</a>", True)),
        ('<a>{"x": [1]}</a>', "<a>null</a>"),
        ("<a></a>", "<a>[1,  2]</a>"),
    ),
    "tags with a separator": (
        "structural_tag",
        LIST,
        ('<a>{"x":1}</a>', '<a>{"x":1}</a>,<a>{"x":2}</a>'),
        ("", '<a>{"x":1}</a><a>{"x":2}</a>'),
    ),
    "a thought first": (
        "structural_tag",
        THOUGHT,
        ('<think>abc</think>ok {"x":1}', '<think></think>7/{"x":1}'),
        ("<think>a", 'ok {"x":1}', '<think>a</think>{"x":1}'),
    ),
    "a text without some": (
        "structural_tag",
        of_format({"type": "any_text", "excludes": ["<b>", "c"]}),
        ("", "a <b", "<<b"),
        ("a<b>", "ca"),
    ),
    "a pattern without some texts": (
        "structural_tag",
        of_format({"type": "regex", "pattern": "[a-c/]*", "excludes": ["ab", "c"]}),
        ("", "a/b", "ba"),
        ("ab", "bac", "d"),
    ),
    "tags behind triggers, in a text without one": (
        "structural_tag",
        of_format(json.loads(CALLS)["format"] | {"excludes": ["<b>"]}),
        ("hello", 'hi <fn=a>{"x":1}</fn> <b'),
        ('<b><fn=a>{"x":1}</fn>', '<fn=a>{"x":1}</fn><b>', '<b><fn=b>{"x":1}'),
    ),
    "a thought without a text": (
        "structural_tag",
        of_format(tag("<a>", "</a>") | {"content": {"type": "any_text", "excludes": ["b"]}}),
        ("<a>x</a>", "<a></a>"),
        ("<a>b</a>", "<a>x</a>b"),
    ),
    "the older structural tag": ("structural_tag", OLDER, ("yo", 'yo <fn=a>{"x":1}</fn>'), ("<fn=b>",)),
}


@pytest.mark.parametrize("name", KINDS)
def test_outputs_match_or_do_not(name: str, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    kind, text, good, bad = KINDS[name]
    for output in good:
        compiler.compile(kind, text, (END,)).consume([*ids(tokenizer, output), END])
    for output in bad:
        with pytest.raises(GrammarError):
            compiler.compile(kind, text, (END,)).consume([*ids(tokenizer, output), END])


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type":', "Expecting value"),
        ("json_schema", "false", "the JSON Schema is false, which allows no output"),
        ("json_schema", "[]", r"the JSON Schema is \[\], but must be an object or true"),
        *(("json_schema", f'{{"x-guidance": {bad}}}', "but must be an object") for bad in ["1", "[]"]),
        ("json_schema", '{"format": []}', "Expected string for 'format'"),
        ("json_schema", '{"format": "date", "allOf": 5}', "allOf"),
        ("json_schema", '{"minLength": false}', "for 'minLength', got false"),
        ("structural_tag", of_format(tag("<a>", "</a>", False)), "the JSON Schema is false, which allows no output"),
        (
            "structural_tag",
            of_format(tag("<a>", "</a>", [])),
            r"the JSON Schema is \[\], but must be an object or true",
        ),
        ("json_schema", '{"type": "nothing"}', "nothing"),
        ("regex", "(", "unclosed group"),
        ("grammar", "start: missing", "missing"),
        ("choice", "[]", r"the choice is \[\], but must be a list of one or more texts"),
        ("choice", '["a", 1]', "a list of one or more texts"),
        ("choice", '["a", ""]', "texts that are not empty"),
        ("structural_tag", "[]", "a JSON object"),
        ("structural_tag", of_format({"type": "poem"}), "'poem', but must have one of const_string, "),
        ("structural_tag", of_format({"type": "triggered_tags", "triggers": ["<x"], "tags": []}), "no tag begins"),
        (
            "structural_tag",
            of_format({"type": "const_string", "value": "a", "excludes": ["a"]}),
            "'excludes' in a format of type 'const_string'",
        ),
        (
            "structural_tag",
            of_format({"type": "any_text", "max_tokens": -1}),
            "-1 as max_tokens, which must be a whole number",
        ),
        ("structural_tag", of_format({"type": "triggered_tags", "triggers": [], "tags": [{}]}), "no 'begin'"),
        (
            "structural_tag",
            of_format({"type": "triggered_tags", "triggers": ["<b"], "tags": [tag("<a", ""), tag("<b", "")]}),
            "none of",
        ),
        ("structural_tag", of_format({"type": "tags_with_separator", "tags": [ONE_DIGIT]}), "'regex' among its tags"),
        (
            "structural_tag",
            of_format({"type": "tags_with_separator", "tags": [tag("", "") | {"excludes": ["a"]}]}),
            "'excludes'",
        ),
        (
            "structural_tag",
            of_format(tag("<a>", "</a>") | {"content": {"type": "any_text", "starts": ["a"]}}),
            "'starts",
        ),
        (
            "structural_tag",
            of_format({"type": "json_schema", "json_schema": POINT, "style": "qwen_xml"}),
            "'style' in a format of type 'json_schema'",
        ),
        ("verse", "a", "does not support grammars of kind verse"),
    ],
)
def test_what_cannot_be_read_says_why(kind: str, text: str, reason: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(kind, text, (END,))


# Values for all fields of all formats, by the type of the field.
TEXTS = {"begin": "<a>", "value": "a", "pattern": "a", "separator": ",", "type": "structural_tag"}
LISTS = {"excludes": ["b"], "triggers": ["<"], "special_tokens": ["<s>"]}
TRUTHS = {"at_least_one": True, "stop_after_first": False}
FLAT = {*TEXTS, *LISTS, *TRUTHS, "end", "max_tokens", "required"}
TAG = tag("<a>", "</a>")
VALUES = {
    **TEXTS, **LISTS, **TRUTHS, "end": ["</a>"], "max_tokens": 5, "json_schema": POINT, "schema": POINT,
    "elements": [ONE_DIGIT], "tags": [TAG], "content": ONE_DIGIT, "format": TAG,
    "structures": [{"begin": "<a>", "schema": POINT, "end": ""}], "required": [True],
}  # fmt: skip
ANY_JSON = [None, True, False, 0, 1, 5.0, -1, 1 << 32, "", "a", [], ["a"], [1], [None], [[]], [{}], {}, {"type": 5}]


def is_of_type(field: str, value: Any) -> bool:
    if value is None:
        return field in {"excludes", "special_tokens", "max_tokens", *TRUTHS}
    if field in ("json_schema", "schema"):
        return value is True or isinstance(value, dict)
    if field in ("elements", "tags", "structures", "required"):
        return value == []
    are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    kinds = {**dict.fromkeys(TEXTS, isinstance(value, str)), **dict.fromkeys(LISTS, are_texts)}
    kinds |= {**dict.fromkeys(TRUTHS, isinstance(value, bool)), "end": isinstance(value, str) or are_texts}
    return kinds.get(field, field == "max_tokens" and type(value) is int and value in (0, 1))


def with_wrong_types() -> Iterator[tuple[str, object]]:
    """Yield field names, each with a structural tag in which that field has a wrong type."""
    whole = {name: VALUES[name] for name in ("type", "format", "special_tokens")}
    older = {name: VALUES[name] for name in ("type", "structures", "triggers")}
    for value in ANY_JSON:
        for base in (whole, older):
            yield from ((field, base | {field: value}) for field in base if not is_of_type(field, value))
        for field in ("begin", "schema", "end"):
            if not is_of_type(field, value):
                yield field, older | {"structures": [*VALUES["structures"], VALUES["structures"][0] | {field: value}]}
        for kind, fields in _FIELDS.items():
            form = {"type": kind} | {field: VALUES[field] for field in fields}
            for field in ("type", *fields):
                if not is_of_type(field, value):
                    yield field, whole | {"format": {"type": "or", "elements": [ONE_DIGIT, form | {field: value}]}}


def test_what_is_of_the_wrong_type_is_named() -> None:
    """Every such error is a ValueError, because an error of the grammar library would not be clear to users."""
    structural_tag_to_lark(json.dumps({name: VALUES[name] for name in ("type", "structures", "triggers")}), {}, ())
    seen = set()
    for field, wrong in with_wrong_types():
        seen.add(field)
        # An object that is not a format is reported by its missing fields, and an invalid JSON Schema by its type.
        text = (
            f"as {field}, which must be"
            if field in FLAT
            else f"as {field}, which|no '(type|begin)'|as type|JSON (Schema|object)"
        )
        with pytest.raises(ValueError, match=text) as caught:
            structural_tag_to_lark(json.dumps(wrong), {}, ())
        assert type(caught.value) is ValueError, wrong
    assert seen == {*VALUES} >= {field for fields in _FIELDS.values() for field in fields}


def test_behind_an_end_token_it_alone_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile("regex", "ab", (END, OTHER_END))
    with pytest.raises(GrammarError):
        matcher.copy().consume([END])  # the output does not match yet
    matcher.consume(ids(tokenizer, "ab"))
    assert allowed(matcher) == [END, OTHER_END]
    matcher.consume([OTHER_END, 77, 78])
    assert matcher.end_token_id == OTHER_END
    matcher.consume([OTHER_END])
    assert allowed(matcher) == allowed(matcher.copy()) == [OTHER_END]


def test_a_grammar_may_be_whole_with_an_end_token_that_it_names(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("grammar", f"start: <[77]>* <[{END}]>", (END, OTHER_END))
    for _ in range(3):
        assert allowed(matcher) == sorted((77, END))
        matcher.consume([77])
    with pytest.raises(GrammarError):
        matcher.copy().consume([OTHER_END])
    matcher.consume([77, END])
    assert allowed(matcher) == [matcher.end_token_id] == [END]
    early = compiler.compile("grammar", f"start: <[77]> <[{END}]> <[78]>", (END,))
    with pytest.raises(GrammarError):
        early.consume([77, END])


@pytest.mark.parametrize("ends", [["</think>"], ["x"], ["</think>", "x"]], ids=str)
@pytest.mark.parametrize("most", [0, 1, 2, 5])
def test_a_limit_of_tokens_forces_the_end_of_a_text(
    most: int, ends: list[str], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """A token limit forces the end of a text exactly at the limit, whether tokens are consumed one by one or together.

    The rest of the grammar follows.
    """
    thought = {"type": "tag", "begin": "<think>", "content": {"type": "any_text", "max_tokens": most}, "end": ends}
    text = of_format({"type": "sequence", "elements": [thought, {"type": "const_string", "value": "ok"}]})
    [letter], begin = ids(tokenizer, "o"), ids(tokenizer, "<think>")
    matcher = compiler.compile("structural_tag", text, (END,))
    matcher.consume(begin)
    for num in range(most + 1):
        at_once = compiler.compile("structural_tag", text, (END,))
        at_once.consume([*begin, *[letter] * num])
        assert allowed(at_once) == allowed(matcher.copy()) == allowed(matcher)
        if num < most:
            assert letter in allowed(matcher)
            matcher.consume([letter])
    assert {tokenizer.id_to_token(token)[0] for token in allowed(matcher)} == {end[0] for end in ends}
    for end in ends:
        matcher.copy().consume([*ids(tokenizer, f"{end}ok"), END])
        with pytest.raises(GrammarError):
            matcher.copy().consume([*ids(tokenizer, end), END])


def test_padding_is_never_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile("regex", "(?s:.*)", (END,))
    assert max(allowed(matcher)) < tokenizer.get_vocab_size() <= VOCAB_SIZE - 40


@pytest.mark.parametrize("vocab_size", [1023, 1000, 992, 961])
def test_a_tokenizer_may_be_longer_than_the_vocabulary(
    vocab_size: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """A tokenizer may have more tokens than the vocabulary, as for Gemma 3 270M.

    Tokens without a logit are not allowed, and the other tokens are unaffected.
    """
    short = GrammarCompiler(TOKENIZER.read_text(encoding="utf-8"), vocab_size)
    for kind, text in (("regex", "(?s:.*)"), ("json_object", ""), ("choice", '["fox", "owl"]')):
        matcher = short.compile(kind, text, (END,)).copy()
        mask = ctypes.create_string_buffer(b"\xff" * (4 * -(-vocab_size // 32)), 4 * -(-vocab_size // 32))
        matcher.fill_mask(ctypes.addressof(mask), len(mask))
        assert bits(mask.raw) == [i for i in allowed(compiler.compile(kind, text, (END,))) if i < vocab_size]
    only = short.compile("grammar", f"start: <[{tokenizer.get_vocab_size() - 1}]>", (END,))
    with pytest.raises(GrammarError, match="only tokens that the model has no logits for"):
        only.fill_mask(ctypes.addressof(mask), len(mask))


@pytest.mark.parametrize("seed", range(4))
def test_state_is_a_function_of_the_tokens(seed: int, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """Walk randomly through the masks.

    The state after some tokens equals the state of a new matcher that consumes all of them, and of a copy.
    """
    rng = seeded(seed)
    pattern = r"([a-f]{1,3}(, |;)){2,6}[0-9]{1,4}"
    matcher, taken = compiler.compile("regex", pattern, (END,)), list[int]()
    while matcher.end_token_id is None:
        again = compiler.compile("regex", pattern, (END,))
        again.consume(taken)
        copied = matcher.copy()
        assert allowed(again) == allowed(copied) == allowed(matcher)
        token = rng.choice(allowed(matcher))
        matcher.consume([token])
        taken.append(token)
    assert re.fullmatch(pattern, tokenizer.decode(taken[:-1]))


@pytest.mark.parametrize("has_threads", [False, True])
def test_masks_of_several_are_those_of_each(compiler: GrammarCompiler, tokenizer: Tokenizer, has_threads: bool) -> None:
    matchers = [compiler.compile("regex", text, (END,)) for text in ("a+", "[0-9]", "x", "(?s:.*)")]
    matchers[2].consume([*ids(tokenizer, "x"), END])
    queue = MaskQueue(has_threads=has_threads)
    jobs = [MaskJob(matcher, (), MASK_BYTES) for matcher in matchers]
    for job in jobs:
        queue.put(job)
    if has_threads:  # the threads compute the masks without a waiting consumer
        with queue._is_done:
            assert queue._is_done.wait_for(lambda: all(job.is_done for job in jobs), 20)
    queue.finish(jobs, None)
    queue.close()
    assert all(job.is_done and job.us and job.error is None for job in jobs)
    assert all(matcher.pace.seconds for matcher in matchers), "what orders the next ones"
    assert [bits(bytes(job.mask)) for job in jobs] == [allowed(matcher) for matcher in matchers]


def test_a_cache_compiles_once_and_forgets_what_was_used_longest_ago(compiler: GrammarCompiler) -> None:
    compiled: list[str] = []

    class CountingCompiler(GrammarCompiler):
        def compile(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
            compiled.append(text)
            return compiler.compile(kind, text, end_token_ids)

    cache = GrammarCache(CountingCompiler("", 0), max_bytes=600_000)  # two small matchers fit
    long = "c" * 5_000  # as large as two small matchers
    for text in ("a", "b", "a", "c", "a", "b", long, "a", long):
        assert allowed(cache.get("regex", text, (END,)))
    assert compiled == ["a", "b", "c", "b", long, "a", long]


# Trial process


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    trials = Trials(TOKENIZER.read_text(encoding="utf-8"), VOCAB_SIZE, (END,))
    yield trials
    trials.close()


@pytest.fixture
def _leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[str]":
        started.append(popen(*arguments, **options))
        return started[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    yield
    assert started
    assert [process.args for process in started if process.returncode is None] == []


@pytest.mark.usefixtures("_leaves_no_process")
@pytest.mark.parametrize("answer", ["\\xff\\n", "no JSON\\n", "5\\n", '"cut', "x" * 1000, ""])
def test_random_output_of_the_trial_process_is_handled(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import sys; sys.stdout.buffer.write(b'{answer}' * 1000)"
    monkeypatch.setattr(trial, "python_command", lambda module: [sys.executable, "-S", "-c", program])
    trials = Trials("{}", VOCAB_SIZE, (END,))
    with pytest.raises(GrammarError, match="the process that reads grammars has ended"):
        trials.run("regex", "a+", (END,))
    trials.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused(name: str, trials: Trials) -> None:
    refusal = trials.run(*HOSTILE[name], (END,))
    print(refusal[:200])
    assert refusal
    assert not trials.run("regex", "a+", (END,)), "the process goes on"


# Each with an output: after a prefix of the output, a step exceeds the limit.
LATE: dict[str, tuple[str, str, str]] = {
    "properties that may be left out": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}),
        '{"p7": "abc", "p8": ""}',
    ),
    "ambiguity": ("grammar", 'start: s\ns: "a" s "a" | "a" s | s "a" | "a"', "a" * 260),
    "ambiguity in the third power": ("grammar", "start: e\ne: e e | e e e | /[ab]/", "ab" * 130),
    "texts that must all be in it": (
        "grammar",
        'start: "x" T\nT: ' + " & ".join(f"/(?s:.*)a(?s:.{{{i}}})b(?s:.*)/" for i in range(4)),
        "xaababbabaabbababab",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_expensive_step_exceeds_its_limit(
    name: str, trials: Trials, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """An output whose later tokens are too expensive exceeds a limit, always at the same token."""
    kind, text, output = LATE[name]
    assert not trials.run(kind, text, (END,))
    token_ids = ids(tokenizer, output)
    places = {num_within_limits(compiler.compile(kind, text, (END,)), token_ids) for _ in range(2)}
    (place,) = places
    assert 0 < place < len(token_ids)


def num_within_limits(matcher: Matcher, token_ids: list[int]) -> int:
    for num_taken, token_id in enumerate(token_ids):
        try:
            allowed(matcher)
            matcher.consume([token_id])
        except GrammarLimitError:
            return num_taken
    return len(token_ids)


def test_a_trial_that_takes_too_much_says_so(trials: Trials) -> None:
    assert trials.run(*HOSTILE["patterns that must all hold"], (END,)) == TOO_MUCH


def test_ctrl_c_in_a_terminal_does_not_reach_the_process(trials: Trials) -> None:
    """The trial process ignores Ctrl-C in a terminal even while its modules load, when Python would
    print a traceback.
    """
    assert trials._process is not None
    assert os.getpgid(trials._process.pid) != os.getpgrp()


def test_a_process_that_was_killed_is_started_again(trials: Trials) -> None:
    assert trials._process is not None
    trials._process.kill()
    assert not trials.run("regex", "a+", (END,))


@pytest.mark.usefixtures("_leaves_no_process")
def test_a_tokenizer_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(GrammarError):
        Trials("{}", VOCAB_SIZE, (END,))
