"""The cost of reading text from clients and models is linear in its length, whatever the text repeats."""

import collections
import contextlib
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.cli.request import SamplePrinter
from pagewire.client.wire import decode_output
from pagewire.common.chat.chat_output import Arguments, CallStart, format_of
from pagewire.common.chat.chat_output.literals import json_of
from pagewire.common.chat.chat_template import ChatTemplateError, without_suffix
from pagewire.common.chat.template_forms import compiled
from pagewire.common.chat.template_sandbox import TemplateFailure
from pagewire.common.grammars.literals import literals_of
from pagewire.common.wire.transport.wrong_port import RightPort
from pagewire.protos.gen.pagewire.scheduler.v1.scheduler_pb2 import GenerateResponse
from scheduler_service.api.http.body import decode_body, decode_query
from scheduler_service.api.http.requests import ChatCompletionRequest, DetachedQuery
from scheduler_service.api.http.tool_calls import SampleReader
from scheduler_service.links import reconnection
from scheduler_service.serving.output import OutputReader, SampleRecord
from scheduler_service.serving.refusal import RefusedError
from testing.chat_output.spellings import FUNCTIONS, SPELLINGS
from testing.chat_output.splitting import merged
from tests.growth import check_growth

_PLACE = " - at `$"
_QUESTION = {"role": "user", "content": "a"}
_PORT = RightPort.of_link("worker", "give --worker", "a worker's port")
# The pieces of error messages, template formats, grammars, regular expressions and literals.
_PIECES = (
    *(_PLACE, f"{_PLACE}.", f"{_PLACE}\n", "`", "[", "]", ".", "\n", " ", "a", "0", "0a", "\\", '"', "'", '\\"', "\\'"),
    *("/", "\\/", "\\/\n", "/a/", "//", "#", "</s>", "<", '"a"', '"a" ', '"a"..', "%json ", "%regex {"),
    *("[]", "[[]", "[\\]", "[^", "(", "(?", "(?P<a", "{", "{1", "\\p{", "\\x", "%", "%1", "{{", "%{"),
    *("1,", "(1,", "[1", "{1}", "{'a':", "-", "not ", "last error: ", "larger than max (1"),
)


def _refused(body: object) -> None:
    encoded = json.dumps(body).encode()
    with pytest.raises(RefusedError):
        decode_body(encoded, ChatCompletionRequest)


def _asked_for(name: str) -> None:
    with pytest.raises(RefusedError):
        decode_query({"request_id": "a", name: "1"}, DetachedQuery)


def _literals(text: str) -> None:
    with contextlib.suppress(ValueError):  # from embedded JSON, which is parsed after the library's check
        collections.deque(literals_of(text), maxlen=0)


def _rest(text: str) -> None:
    """Render a message that is continued and that the template has not written at its beginning."""
    with pytest.raises(ChatTemplateError):
        without_suffix(text * 4, {"content": f"{text}\0{text}"})


def _formatted(text: str) -> None:
    with contextlib.suppress(TemplateFailure):
        compiled("{{ text % 1 }}{{ text.format() }}").render({"text": text})


_READERS: dict[str, Callable[[str], object]] = {
    "field": lambda text: _refused({text: 1}),
    "field within": lambda text: _refused({"messages": [_QUESTION], "stream_options": {text: 1}}),
    "choice": lambda text: _refused({"messages": [_QUESTION], "response_format": {"type": text}}),
    "query": _asked_for,
    "literal": json_of,
    "literal in quotes": lambda text: json_of(f"'{text}"),
    "formatted literal": lambda text: json_of(f"f'{text}'"),
    "lark": lambda text: _literals(text),
    "text in lark": lambda text: _literals(f'"{text}'),
    "regex in lark": lambda text: _literals(f"/{text}/"),
    "message that goes on": _rest,
    "format": _formatted,
    "peer's last error": lambda text: reconnection._LAST_ERROR.sub("", text),
    "peer": lambda text: _PORT.reading("here", text),
}


@pytest.mark.parametrize("reader", _READERS)
def test_a_text_costs_as_much_as_it_is_long(reader: str) -> None:
    read = _READERS[reader]
    for piece in _PIECES:
        for end in ("", "\n", "b"):

            def prepare(size: int, piece: str = piece, end: str = end) -> Callable[[], object]:
                text = piece * (size // len(piece)) + end
                return lambda: read(text)

            check_growth((piece, end), prepare, 4000)


def test_arguments_cost_as_much_as_they_are_long() -> None:
    """Parsing tool call arguments takes linear time.

    The arguments of a response that is not streamed are parsed in one piece.
    """

    def prepare(size: int) -> Callable[[], object]:
        spelling = SPELLINGS["qwen-coder"]
        text = f"<tool_call>\n<function=f>\n{'<parameter=text>x</parameter>' * size}</function>\n</tool_call>"
        reader = SampleReader(format_of(spelling.template).parser("", {"f": {}}))
        return lambda: reader.read(text, is_last=True)

    check_growth("parameters", prepare, 500)


class _Decoder:
    """A decoder that decodes every token to the same text."""

    def push(self, token_ids: Any) -> tuple[str, str | None, int]:
        return "abcd" * len(token_ids), None, len(token_ids)

    def flush(self) -> tuple[str, str | None, int]:
        return "", None, 0


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_token_of_a_long_output_is_read_as_fast_as_the_first(is_kept: bool) -> None:
    def prepare(size: int) -> Callable[[], object]:
        output = SampleRecord(0, _Decoder(), is_kept=is_kept)
        reader, texts = OutputReader(output), []

        def run() -> None:
            for token_id in range(size):
                output.publish(token_id, 0.0)
                output.process_output()
                texts.extend(delta.text for delta in reader.take())
            assert "".join(texts) == "abcd" * size

        return run

    check_growth("tokens", prepare, 12_500)


def test_the_text_of_an_output_is_read_in_any_pieces() -> None:
    output = SampleRecord(0, _Decoder(), is_kept=True)
    output.add(range(5000))
    output.process_output()
    for size in (1, 255, 256, 257, 1000, 4999, 5000):
        reader = OutputReader(output, max_tokens=size)
        assert [len(delta.text) // 4 for delta in reader.take()] == [
            min(size, 5000 - first) for first in range(0, 5000, size)
        ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({f"a{_PLACE}.messages`": 1}, ".a"),
        ({"a" * (1 << 20): 1}, "a" * 60),
        ({"messages": [_QUESTION], "stream_options": {f"b{_PLACE}.c": 1}}, "stream_options.b - at "),
        ({"messages": [_QUESTION], "stream_options": {f"{_PLACE * 1000}\n": 1}}, "stream_options. - at "),
    ],
)
def test_the_place_of_an_unknown_field_is_found_behind_its_name(body: Any, field: str) -> None:
    with pytest.raises(RefusedError) as refused:
        decode_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert refused.value.field.endswith(field)
    assert len(refused.value.field) < 100


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-007", "-7"),
        ("00", "0"),
        ("0" * 5000 + "7", "7"),
        ("0" + "1" * 5000, None),  # more digits than Python converts
        ("00a", None),
        (f"{{'a': '{'b, ' * 10_000}'}}", json.dumps({"a": "b, " * 10_000})),
        (f"[{'True, ' * 500}]", json.dumps([True] * 500)),
        (f"[{'True, ' * 2000}]", None),  # parsing would block the event loop
        # Quotes that do not hide the following values from Python's parser.
        (f"[#'\n{'True, ' * 2000}]", None),
        (f"[#'\r{'True, ' * 2000}]", None),
        (f'["""a"b""", {"True, " * 2000}]', None),
        (f"['''a'b''', {'True, ' * 2000}]", None),
        ("[True, # a\n 'b']", '[true, "b"]'),
        ('("""a"b""")', '"a\\"b"'),
        ("f'{1}'", None),
        (json.dumps([1] * 10_000), json.dumps([1] * 10_000)),
    ],
)
def test_a_literal_is_read_unless_it_is_too_large(text: str, found: str | None) -> None:
    assert json_of(text) == found


def test_a_number_of_too_many_digits_is_a_text() -> None:
    parser = format_of(SPELLINGS["qwen-coder"].template).parser("", FUNCTIONS)
    digits = "0" + "1" * 5000
    text = f"<tool_call><function=f><parameter=number>{digits}</parameter></function></tool_call>"
    assert merged(parser.feed(text, is_last=True)) == [CallStart("f"), Arguments(f'{{"number": "{digits}"}}')]


def test_a_token_of_a_long_output_is_printed_as_fast_as_the_first() -> None:
    def prepare(size: int) -> Callable[[], object]:
        printer, output = (
            SamplePrinter(1, io.StringIO()),
            decode_output(GenerateResponse(token_ids=[1], text="abcd" * 8)),
        )

        def run() -> None:
            for _ in range(size):
                printer.add(output)
            assert printer.text == output.text * size

        return run

    check_growth("tokens", prepare, 12_500)
