"""The texts of errors for invalid fields: each names the field, quotes the value and lists the accepted values."""

import itertools
from collections import Counter

import msgspec
import pytest

from scheduler_service.api.http.body import decode_body
from scheduler_service.api.http.responses.requests import InputItems
from scheduler_service.api.http.routes import POSTED
from scheduler_service.serving.refusal import RefusedError
from testing.seeds import seeded
from testing.serving.http_server import HttpServer
from tests.contract.http.broken_fields import Broken, FieldBreaker, faults_of

# The items of a Responses request are decoded apart from the request.
KINDS = list(dict.fromkeys((*(route.request for route in POSTED), InputItems)))
NUM_QUICK = 80  # cases of each kind in the quick test
NUM_SENT = 3  # cases of each route that are sent to a server


def refusal(case: Broken) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        decode_body(msgspec.json.encode(case.body), case.kind)
    return caught.value


def check(case: Broken) -> None:
    error = refusal(case)
    assert not faults_of(str(error), case), (str(error), case)
    assert str(error).startswith(error.field or "the body")


def test_some_invalid_fields_of_each_request() -> None:
    rng = seeded()
    for kind in KINDS:
        cases = list(FieldBreaker(kind, rng).cases())
        for case in rng.sample(cases, min(NUM_QUICK, len(cases))):
            check(case)


@pytest.mark.thorough
def test_each_invalid_field_of_each_request() -> None:
    rng = seeded()
    faults = Counter[str]()
    for kind, _ in itertools.product(KINDS, range(3)):
        for case in FieldBreaker(kind, rng).cases():
            check(case)
            faults[case.fault] += 1
    print(faults)
    assert min(faults.values()) > 2
    assert sum(faults.values()) > 5000


async def test_the_error_of_an_answer(server: HttpServer) -> None:
    """Clients of each route get the text of the error, and the path of the field as `param`."""
    rng = seeded()
    for route in POSTED:
        cases = list(FieldBreaker(route.request, rng).cases())
        for case in rng.sample(cases, NUM_SENT):
            answer = await server.client.post(route.path, content=msgspec.json.encode(case.body))
            error, expected = answer.json()["error"], refusal(case)
            if isinstance(error, str):  # Ollama's errors consist of a message alone
                error = {"message": error, "param": expected.field}
            assert (answer.status_code, error["message"], error["param"] or "") == (400, str(expected), expected.field)


async def test_messages_have_the_names_of_the_client(server: HttpServer) -> None:
    """Limits that all APIs share are checked under common names, but the client reads the name that it sent."""
    question = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    for path, body, text in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": 10**6}, " tokens and max_output_tokens is 1000000, "),
        ("/v1/messages", question | {"stop_sequences": ["x" * 300]}, "stop_sequences[0] has 300 characters, but must "),
        ("/v1/completions", {"prompt": "hi", "guided_regex": "("}, "guided_regex cannot be used: "),
        ("/v1/chat/completions", question | {"logit_bias": {"99999": 1}}, "logit_bias[99999] is the token id 99999, "),
    ):
        error = await server.refusal(path, **body)
        assert text in error["message"], error


def test_large_values_are_not_quoted() -> None:
    for value in ("x" * 1_000_000, ["x"] * 100_000, {str(key): "x" for key in range(50_000)}):
        case = Broken(POSTED[0].request, "type", {"prompt": "x", "n": value}, "n", str(len(value)), ("an integer",))
        check(case)
        assert len(str(refusal(case))) < 200


def test_odd_names_of_fields() -> None:
    names = [
        "two\nlines",
        "max-tokens",
        "a` - at `$.messages[0]",
        "b` - at `key` in `$.logit_bias",
        "c" * 500,
        "ä",
        "5",
    ]
    for name in names:
        for body in ({name: 1}, {"response_format": {"type": "text", name: 1}}):
            error = refusal(Broken(POSTED[0].request, "unknown", {"prompt": "x"} | body, "", "", ()))
            assert "is not a field of this request" in str(error)
            assert "\n" not in str(error) + error.field
            assert len(str(error)) < 400


def test_numbers_beyond_the_largest() -> None:
    for number in (b"1e400", b"7" * 5000):
        with pytest.raises(RefusedError, match=r"^n is a number beyond 1\.8e308 or with more than 4300 digits; "):
            decode_body(b'{"prompt": "x", "n": ' + number + b"}", POSTED[0].request)
