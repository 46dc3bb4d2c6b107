"""The values of a body are counted before decoding, so that no kind of value makes decoding slow."""

from functools import partial
from typing import Any

import msgspec
import pytest

from pagewire.common.strict_json import MAX_VALUES, count_values, from_json
from scheduler_service.api.http.body import MAX_BODY_BYTES, decode_body
from scheduler_service.api.http.requests import CompletionRequest
from scheduler_service.serving.refusal import RefusedError
from scheduler_service.serving.turns import PIECE_SIZE
from tests.growth import check_costs

MAX_RATIO = 6  # of the time of a kind to that of numbers
BEGIN, END = b'{"prompt": "x", "metadata": {"a": [', b"]}}"
KINDS = {
    "numbers": (b"1", 1),
    "lists": (b"[]", 7),
    "objects": (b"{}", 7),
    "texts": (b'"a"', 5),
    "keys": (b'{"a":1}', 11),
    "fractions": (b"9007199254740993.00000000000000000001", 46),
    "hard fractions": (b"9007199254740993.0" + b"0" * 400 + b"1", 616),
    "long numbers": (b"7" * 300, 451),
    "longest numbers": (b"7" * 4299, 6421),
    "exponents": (b"1e308", 501),
    "large exponents": (b"1E-320", 501),
    "truths": (b"true", 1),
}


def body_of(piece: bytes, number: int) -> bytes:
    return BEGIN + b",".join([piece] * number) + END


def decode(body: bytes) -> Any:
    try:
        return decode_body(body, CompletionRequest)
    except RefusedError as refusal:
        return refusal


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_counted(kind: str) -> None:
    piece, weight = KINDS[kind]
    base = count_values(BEGIN + END)
    assert count_values(body_of(piece, 1000)) - base == 1000 * weight - 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (b"[]", 6),
        (b'"[[[,,,{{{1e5.5"', 4),
        (b'"\\"[1,2]\\\\"', 4),
        (b'["\\\\", 1.5, "\\\\\\"[", -2e5, true, false, null]', 6 + 4 + 15 + 4 + 500 + 6),
    ],
)
def test_characters_in_strings_are_not_counted(text: bytes, number: int) -> None:
    assert count_values(text) == number


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_takes_much_longer_than_numbers(kind: str) -> None:
    """Decoding the largest accepted body takes a similar time for each kind of value.

    Without the limit, 4 MiB of exponents took ten seconds.
    """
    piece, weight = KINDS[kind]
    most = min((MAX_BODY_BYTES - 100) // (len(piece) + 1), (MAX_VALUES - 100) // weight)
    numbers = body_of(b"12", MAX_VALUES - 100)
    whole, larger = body_of(piece, most), body_of(piece, (MAX_BODY_BYTES - 100) // (len(piece) + 1))
    assert not isinstance(decode(whole), RefusedError)
    for body in (whole, larger):
        check_costs(kind, lambda: partial(decode, numbers), lambda body=body: partial(decode, body), MAX_RATIO)


def test_too_many_values_are_refused_with_their_number() -> None:
    refusal = decode(body_of(b"[]", 1_000_000))
    assert isinstance(refusal, RefusedError)
    body = body_of(b"[]", 1_000_000)
    assert f"the body has at least {count_values(body)} values; the limit is {MAX_VALUES}" in str(refusal)
    with pytest.raises(ValueError, match=f"at most {MAX_VALUES} are allowed"):
        from_json("[" + ",".join(["[]"] * 1_000_000) + "]")


def test_a_large_request_is_kept_without_fields_of_no_effect() -> None:
    inert: dict[str, Any] = {"user": "x" * PIECE_SIZE, "metadata": {"a": "b"}, "service_tier": "auto", "store": True}
    small = decode(msgspec.json.encode({"prompt": "x", "seed": 1} | inert | {"user": "x"}))
    assert (small.user, small.metadata) == ("x", {"a": "b"})
    large = decode(msgspec.json.encode({"prompt": "x", "seed": 1} | inert))
    assert (large.prompt, large.seed) == ("x", 1)
    assert [getattr(large, name) for name in inert] == [None] * len(inert)
