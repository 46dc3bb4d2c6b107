"""JSON Schemas as tools generate them.

Keywords without an effect do not prevent a schema from being accepted. Outputs are as restricted as the schema says.
"""

import datetime
import decimal
import enum
import ipaddress
import json
import re
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest
from pydantic import AfterValidator, BaseModel, Field
from tokenizers import Tokenizer
from typing_extensions import TypeAliasType

from pagewire.common.grammars import GrammarCompiler, GrammarError
from pagewire.common.grammars.json_schema import FORMATS
from testing.seeds import seeded
from testing.sources import ROOT

TOKENIZER = ROOT / "models" / "storyteller" / "tokenizer.json"
END = 0
LARGEST = (1 << 63) - 1024  # the largest float64 below 2**63


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Point(BaseModel):
    """The model's docstring is its description in the schema."""

    x: int = 0
    y: float = Field(0.5, description="up", examples=[1.5], deprecated=True)


class Node(BaseModel):
    name: str
    children: list["Node"] = []


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]


Name = TypeAliasType("Name", str)
Key = Annotated[str, Field(min_length=0, examples=["a"], json_schema_extra={"x-a": 1})]
NOON = datetime.datetime(2024, 2, 29, 12, 30, 1, tzinfo=datetime.UTC)
# Types from which pydantic generates schemas, each with a valid value.
TYPES: list[tuple[Any, Any]] = [
    (int, -3),
    (float, 2.5),
    (bool, True),
    (str, "a b"),
    (bytes, b"abc"),
    (None, None),
    (Any, {"a": [1, None]}),
    (object, "x"),
    (list, [1, "a"]),
    (dict, {"a": 1}),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (Literal["a", 1, None], 1),
    (Colour, Colour.RED),
    (Level, Level.HIGH),
    (int | str, "a"),
    (Path, Path("/tmp/a.txt")),
    (uuid.UUID, uuid.UUID(int=7)),
    (datetime.date, NOON.date()),
    (datetime.time, NOON.timetz()),
    (datetime.datetime, NOON),
    (datetime.timedelta, datetime.timedelta(hours=3)),
    (ipaddress.IPv4Address, ipaddress.IPv4Address("10.0.0.1")),
    (ipaddress.IPv6Address, ipaddress.IPv6Address("fe80::1")),
    (ipaddress.IPv4Network, ipaddress.IPv4Network("10.0.0.0/8")),
    (ipaddress.IPv6Interface, ipaddress.IPv6Interface("fe80::1/64")),
    (re.Pattern, re.compile("a+")),
    (pydantic.SecretBytes, pydantic.SecretBytes(b"x")),
    (pydantic.SecretStr, pydantic.SecretStr("x")),
    (pydantic.AnyUrl, pydantic.AnyUrl("https://a.org/b")),
    (pydantic.HttpUrl, pydantic.HttpUrl("https://a.org/")),
    (pydantic.PostgresDsn, pydantic.PostgresDsn("postgres://u@h/d")),
    (pydantic.Base64Bytes, b"YWJj"),
    (pydantic.Base64Str, "YWJj"),
    (pydantic.Json, '{"a": 1}'),
    (pydantic.Json[list[int]], "[1]"),
    (pydantic.AwareDatetime, NOON),
    (pydantic.PositiveInt, 4),
    (pydantic.NonNegativeFloat, 0.0),
    (pydantic.StrictInt, 4),
    (pydantic.ByteSize, 4),
    (Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)], LARGEST),
    (Annotated[int, Field(ge=0, le=(1 << 64) - 1)], 12),
    (Annotated[int, Field(multiple_of=5, lt=100)], 35),
    (Annotated[float, Field(gt=0.5, le=1e6)], 0.75),
    (Annotated[str, Field(pattern=r"^[a-z]+\d$", min_length=2, max_length=9)], "ab1"),
    (Annotated[str, Field(max_length=(1 << 31) - 1)], "ab"),
    (Annotated[list[int], Field(min_length=1, max_length=3)], [1, 2]),
    (Annotated[str, AfterValidator(str.lower)], "ab"),
    (Point, Point()),
    (Node, Node(name="a", children=[Node(name="b")])),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Cat(kind="cat")),
    (dict[int, str], {3: "a"}),
    (dict[uuid.UUID, int], {uuid.UUID(int=7): 1}),
    (dict[Annotated[str, Field(description="a name")], int], {"a": 1}),
    (dict[Name, int], {"a": 1}),
    (dict[Path, int], {"a/b": 1}),
    (dict[Key, int], {"a": 1}),
    (Annotated[float, Field(gt=0, lt=1)], 0.5),
    (Annotated[float, Field(ge=-1.7976931348623157e308, le=1.7976931348623157e308)], 2.5),
    (decimal.Decimal, decimal.Decimal("1.5")),
    (set[int], {1}),
    (frozenset[str], {"a"}),
    (dict[Colour, int], {Colour.RED: 1}),
    (dict[Annotated[str, Field(pattern="^a")], int], {"a": 1}),
]
# Types whose schemas have a keyword that restricts values and that the grammar library does not support.
MATTERS: list[tuple[Any, str]] = [
    (dict[uuid.UUID, int], "propertyNames"),
    (dict[Colour, int], "propertyNames"),
    (set[int], "uniqueItems"),
    (frozenset[str], "uniqueItems"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.read_text(encoding="utf-8"), 1024)


@pytest.fixture
def matches(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Any:
    """A function that returns whether a schema allows an output."""

    def matches(schema: Any, output: str) -> bool:
        matcher = compiler.compile("json_schema", json.dumps(schema), (END,))
        try:
            matcher.consume([*tokenizer.encode(output, add_special_tokens=False).ids, END])
        except GrammarError:
            return False
        return True

    return matches


def wrapped(kind: Any, value: Any) -> list[tuple[Any, Any]]:
    return [
        (kind, value),
        (kind | None if kind is not None else Any, None),
        (list[kind], [value, value]),
        (dict[str, kind], {"k": value}),
    ]


@pytest.mark.parametrize("number", range(len(TYPES)))
def test_what_pydantic_writes_is_served_unless_a_keyword_matters(
    number: int, matches: Any, compiler: GrammarCompiler
) -> None:
    keyword = next((keyword for kind, keyword in MATTERS if kind == TYPES[number][0]), "")
    for kind, value in wrapped(*TYPES[number]):
        model = pydantic.create_model("M", field=(kind, Field(description="what it is")))
        schema = model.model_json_schema()
        output = model.model_construct(field=value).model_dump_json(warnings=False)
        refusal = refusal_of(compiler, "json_schema", json.dumps(schema))
        if keyword:
            assert f'"{keyword}"' in refusal, (schema, refusal)
        else:
            assert matches(schema, output), (schema, refusal, output)


def test_there_are_200_models() -> None:
    assert sum(len(wrapped(*entry)) for entry in TYPES) >= 200


# Schemas as other tools generate them, with matching outputs and outputs that do not match.
TOLD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # from zod 4's z.toJSONSchema: an object with a record, an int, a url, and an optional field
    (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "tags": {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {"type": "number"},
                },
                "n": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
                "site": {"type": "string", "format": "uri-reference"},
                "file": {"type": "string", "format": "binary", "contentEncoding": "binary"},
            },
            "required": ["tags", "n"],
            "additionalProperties": False,
        },
        ['{"tags":{"a":1.5},"n":9007199254740991,"site":"no uri"}', '{"tags":{},"n":0}'],
        ['{"tags":{"a":"b"},"n":1}', '{"tags":{},"n":9007199254740992}', '{"n":1}'],
    ),
    # an OpenAPI 3.0 document of a pet shop
    (
        {
            "$ref": "#/components/schemas/Pet",
            "components": {
                "schemas": {
                    "Pet": {
                        "type": "object",
                        "required": ["id"],
                        "properties": {
                            "id": {"type": "integer", "format": "int64", "minimum": 0, "maximum": 9223372036854775807},
                            "photo": {
                                "type": "array",
                                "uniqueItems": False,
                                "items": {"type": "string", "format": "uri-x"},
                            },
                            "born": {"type": "string", "format": "date", "deprecated": True},
                            "size": {"type": "number", "format": "double", "example": 1.5, "xml": {"name": "s"}},
                        },
                        "additionalProperties": False,
                    }
                }
            },
        },
        ['{"id":9223372036854774784,"photo":["a","a"]}', '{"id":1,"born":"2000-02-29","size":1.5}'],
        ['{"id":9223372036854775808}', '{"id":-1}', '{"id":1,"born":"1900-02-29"}', '{"id":1,"size":"1"}'],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "integer"}}, ["[]", "[1]"], ["[1,1]"]),
    ({"type": ["integer", "null"], "maximum": 1 << 70}, ["null", "7"], ["1.5"]),
    # from zod-to-json-schema: a union with an optional, and z.never()
    (
        {"type": "object", "properties": {"a": {"anyOf": [{"not": {}}, {"type": "string"}]}, "b": {"not": {}}}},
        ['{"a":"x"}', "{}"],
        ['{"a":1}', '{"b":1}'],
    ),
    # in OpenAPI 3.1's own dialect, and in OpenAPI 3.0, whose exclusive bounds are booleans
    (
        {
            "$schema": "https://spec.openapis.org/oas/3.1/dialect/base",
            "type": "object",
            "properties": {
                "share": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5},
                "size": {"type": "number", "format": "float", "minimum": -3.4028235e38, "maximum": 3.4028235e38},
                "n": {"type": "integer", "maximum": 9, "exclusiveMaximum": False},
            },
            "dependentRequired": {"n": []},
        },
        ['{"share":0.001,"size":-2.5,"n":9}', '{"share":0.5}'],
        ['{"share":0}', '{"share":0.0}', '{"n":10}'],
    ),
    ({"type": "integer", "exclusiveMaximum": 1 << 60}, ["7"], [str(1 << 60)]),
    ({"enum": [1 << 60, -(1 << 53), 2.5, {"a": [1e-9]}]}, [str(1 << 60), "2.5", '{"a":[0.000000001]}'], ["2"]),
    ({"type": "string", "if": {"minLength": 1}, "minContains": 2}, ['"a"'], ["1"]),
    ({"enum": ["a"], "dependentRequired": {}, "not": False, "unevaluatedProperties": True}, ['"a"'], ['"b"']),
    ({"const": {"format": "x", "uniqueItems": False}}, ['{"format":"x","uniqueItems":false}'], ['{"format":"x"}']),
    ({"properties": {"format": {"format": "x", "type": "string"}}}, ['{"format":"y"}'], ['{"format":1}']),
    # Property names have one spelling, so that an escaped spelling cannot bypass a property's schema.
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":"x"}', '{"a":1,"a\\n":"x"}'],
        ['{"a":1,"\\u0061":"x"}', '{"a":1,"\\u0062":"x"}', '{"a":1,"a":"x"}'],
    ),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        ['{"ab":1}', '{"b":"x"}'],
        ['{"\\u0061b":"x"}', '{"ab":"x"}'],
    ),
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2024-02-29"'], ['"2023-02-29"', '"1996-02-29"']),
    ({"format": "date"}, ['"2024-02-29"', "7"], ['"2023-02-29"', '"x"']),
]


@pytest.mark.parametrize("index", range(len(TOLD)))
def test_what_asks_for_nothing_is_dropped_and_nothing_else(index: int, matches: Any) -> None:
    schema, good, bad = TOLD[index]
    assert [output for output in good if not matches(schema, output)] == []
    assert [output for output in bad if matches(schema, output)] == []


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "if": {"minLength": 1}, "then": {"maxLength": 3}}, "if"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"properties": {"a": {"items": [{"anyOf": [{"uniqueItems": True}]}]}}}, "uniqueItems"),
        ({"propertyNames": {"$ref": "#/$defs/short"}, "$defs": {"short": {"maxLength": 3}}}, "propertyNames"),
        ({"propertyNames": {"$ref": "#/$defs/none"}}, "propertyNames"),
        ({"propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "propertyNames"),
    ],
)
def test_what_excludes_something_is_refused_by_name(schema: Any, keyword: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=f'"{keyword}"'):
        compiler.compile("json_schema", json.dumps(schema), (END,))


@pytest.mark.parametrize("value", [(1 << 53) + 1, {"a": [-(1 << 53) - 1]}, 10**20, 1e300])
def test_a_number_that_is_not_told_from_others_is_refused(value: Any, compiler: GrammarCompiler) -> None:
    for schema in ({"const": value}, {"items": {"enum": [1, value]}}):
        with pytest.raises(GrammarError, match=r"const or enum has the number .* which is read inexactly"):
            compiler.compile("json_schema", json.dumps(schema), (END,))


BOUNDS = (None, -5, -1, -0.5, 0, 0.1, 0.5, 1, 1.5, 2, 99.95, 100)
STEPS = (0, decimal.Decimal("0.001"), decimal.Decimal("-0.001"), 1, -1)


@pytest.mark.parametrize("seed", range(2))
def test_numbers_keep_to_their_bounds(seed: int, matches: Any, compiler: GrammarCompiler) -> None:
    rng = seeded(seed)
    for _ in range(60):
        low, high = sorted(rng.sample(BOUNDS, 2), key=lambda bound: (bound is not None, bound or 0))
        if low is None and rng.random() < 0.5:
            low, high = high, low
        least, most = rng.choice(("minimum", "exclusiveMinimum")), rng.choice(("maximum", "exclusiveMaximum"))
        bounds = {name: bound for name, bound in ((least, low), (most, high)) if bound is not None}
        kind = rng.choice(("number", "integer"))
        schema = {"type": kind, **bounds}
        if kind == "integer":
            whole = map(decimal.Decimal, range(-10, 110))
            has_some = any(all(holds(name, bound, number) for name, bound in bounds.items()) for number in whole)
            assert bool(refusal_of(compiler, "json_schema", json.dumps(schema))) != has_some, schema
            if not has_some:
                continue
        for number in {decimal.Decimal(str(bound)) + step for bound in (0, *bounds.values()) for step in STEPS}:
            is_in = all(holds(name, bound, number) for name, bound in bounds.items())
            is_in = is_in and (kind == "number" or number == int(number))
            text = f"{number:f}" if number != int(number) else f"{number:.0f}"
            assert matches(schema, text) == is_in, (schema, text)
            assert number or is_in or not matches(schema, "-0"), schema


def holds(name: str, bound: float, number: decimal.Decimal) -> bool:
    """Return whether a number is within a bound."""
    is_equal, is_less = number == decimal.Decimal(str(bound)), number < decimal.Decimal(str(bound))
    return not name.startswith("exclusive") if is_equal else is_less == name.lower().endswith("maximum")


def test_the_formats_are_those_of_the_library(compiler: GrammarCompiler) -> None:
    """The known formats equal the library's formats.

    A new format of the library must not be treated as an annotation here.
    """
    known = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
    known |= {"uri-reference", "iri", "iri-reference", "idn-email", "idn-hostname", "regex", "json-pointer"}
    known |= {
        "relative-json-pointer",
        "uri-template",
        "byte",
        "binary",
        "password",
        "int32",
        "int64",
        "float",
        "double",
    }
    schemas = {name: json.dumps({"type": "string", "format": name}) for name in known}
    read = {name for name, schema in schemas.items() if not refusal_of(compiler, "grammar", f"start: %json {schema}")}
    assert read == FORMATS


def refusal_of(compiler: GrammarCompiler, kind: str, text: str) -> str:
    try:
        compiler.compile(kind, text, (END,))
    except GrammarError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(3))
def test_dates_are_those_of_the_calendar(seed: int, matches: Any) -> None:
    rng = seeded(seed)
    for _ in range(150):
        year = rng.choice([0, 1, 4, 100, 400, 1900, 2000, rng.randrange(10000)])
        text = (
            f"{year:04}-{rng.choice([2, 2, rng.randrange(14)]):02}-{rng.choice([28, 29, 30, 31, rng.randrange(34)]):02}"
        )
        try:
            datetime.date.fromisoformat(text)
            is_date = True
        except ValueError:
            is_date = False
        assert matches({"type": "string", "format": "date"}, f'"{text}"') == is_date, text
        assert matches({"type": "string", "format": "date-time"}, f'"{text}T23:59:59.5Z"') == is_date, text
    assert not matches({"type": "string", "format": "time"}, '"12:00:60Z"'), "a leap second ends a day, if at all"
