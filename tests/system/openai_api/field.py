"""A field of a request, what becomes of it, and what shows that. docs/openai_fields.md is made of these."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import jsonschema

from tests.system.openai_api.reply import Reply

Body = Mapping[str, Any]
ABSENT = object()  # as a value: the request goes without this field
# A JSON Schema whose every object is short.
COUNT = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
_REFUSED_BY_PAGEWIRE = "start_generation_failed"  # how the gateway's `code` calls it


class Verdict(Enum):
    HONOURED = "honoured"
    CHANGED = "changed"
    REFUSED = "refused by the gateway"
    REFUSED_BY_PAGEWIRE = "refused by Pagewire"
    IGNORED = "ignored"


@dataclass(frozen=True)
class Exchange:
    plain: Reply  # to the request without the field
    reply: Reply  # to the request with it
    ask: Callable[[Body], Reply]  # what is answered to the plain request with other fields
    send: Callable[[str, Body], Reply]  # to any path


Proof = Callable[[Exchange], bool]


@dataclass(frozen=True)
class Field:
    name: str
    verdict: Verdict
    body: Body  # what the request with the field has beyond the plain one
    proof: Proof
    note: str = ""
    beside: Body = field(default_factory=dict)  # what both requests have beyond the route's own
    status: int = 200


@dataclass(frozen=True)
class Route:
    path: str
    plain: Body
    fields: tuple[Field, ...]
    unknown: Verdict  # what becomes of fields that the table does not name


def merged(*bodies: Body) -> dict[str, Any]:
    """Later ones win; objects under `sampling_params` are merged themselves."""
    result: dict[str, Any] = {}
    for body in bodies:
        for name, value in dict(body).items():
            if name == "sampling_params":
                value = merged(result.get(name, {}), value)
            result[name] = value
    return result


def without_absent(body: Body) -> dict[str, Any]:
    present = {name: value for name, value in body.items() if value is not ABSENT}
    return {name: without_absent(value) if isinstance(value, dict) else value for name, value in present.items()}


def honoured(name: str, body: Body, proof: Proof | None = None, *, note: str = "", beside: Body | None = None) -> Field:
    """`proof` is that the text differs, unless given."""
    return Field(name, Verdict.HONOURED, body, proof or differs, note, beside or {})


def changed(name: str, body: Body, proof: Proof, *, note: str, beside: Body | None = None) -> Field:
    return Field(name, Verdict.CHANGED, body, proof, note, beside or {})


def ignored(name: str, body: Body, *, note: str = "", beside: Body | None = None) -> Field:
    """The body's values are such that honouring them would change the answer, where they could."""
    return Field(
        name,
        Verdict.IGNORED,
        body,
        lambda exchange: exchange.reply.essence == exchange.plain.essence,
        note,
        beside or {},
    )


def refused(name: str, body: Body, *, note: str = "", says: str = "", status: int = 400) -> Field:
    """The message names the field, or has the text `says`."""
    return Field(name, Verdict.REFUSED, body, _names(says or last_part(name)), note, {}, status)


def refused_by_pagewire(name: str, body: Body, *, note: str = "", says: str = "") -> Field:
    return Field(
        name, Verdict.REFUSED_BY_PAGEWIRE, body, _names(says or last_part(name), _REFUSED_BY_PAGEWIRE), note, {}, 400
    )


def constraints(prefix: str = "") -> tuple[Field, ...]:
    """The fields of what the output must match that the gateway has beyond OpenAI's."""
    outer = prefix.removesuffix(".")

    def body(values: Body) -> Body:
        return {outer: values} if outer else values

    def has(text: str) -> Proof:
        return lambda exchange: (exchange.reply.text, exchange.reply.ends) == (text, ["stop"])

    grammar = 'start: "a" "b"'
    return (
        honoured(f"{prefix}json_schema", body({"json_schema": json.dumps(COUNT)}), counts),
        honoured(f"{prefix}regex", body({"regex": "a{3}b"}), has("aaab"), note="the whole output matches it"),
        honoured(f"{prefix}ebnf", body({"ebnf": grammar}), has("ab"), note="in llguidance's variant of Lark too"),
        refused_by_pagewire(f"{prefix}regex, that is none", body({"regex": "("})),
    )


def counts(exchange: Exchange) -> bool:
    return is_count(exchange.reply.text) and exchange.reply.ends in (["stop"], ["completed"])


def is_count(text: str) -> bool:
    jsonschema.validate(json.loads(text), COUNT)
    return True


def last_part(name: str) -> str:
    """The field's own name in `sampling_params.n` or `stop, more than 4`."""
    return name.partition(",")[0].rpartition(".")[2]


def differs(exchange: Exchange) -> bool:
    return exchange.reply.status == 200 and exchange.reply.texts != exchange.plain.texts


def varies(body: Body) -> Proof:
    """Requests for which seeds are drawn get various texts. The likeliest 24 tokens come with a chance of 0.002, and so
    eight times in a row with one of 1e-21."""

    def holds(exchange: Exchange) -> bool:
        first = exchange.ask(body).texts
        return any(exchange.ask(body).texts != first for _ in range(7))

    return holds


def greedy(exchange: Exchange) -> bool:
    """A request that samples got what the route's plain one gets, which is greedy."""
    return exchange.reply.texts == exchange.ask({}).texts


def repeats(seeded: Body, other: Body) -> Proof:
    """Equal seeds give equal samples, and other seeds others."""

    def holds(exchange: Exchange) -> bool:
        texts = exchange.reply.texts
        return texts == exchange.ask(seeded).texts != exchange.ask(other).texts

    return holds


def has_texts(count: int) -> Proof:
    return lambda exchange: len(exchange.reply.texts) == count


def _names(text: str, code: str = "") -> Proof:
    def holds(exchange: Exchange) -> bool:
        error = exchange.reply.error
        return text in error["message"] and (error["code"] == _REFUSED_BY_PAGEWIRE) == bool(code)

    return holds
