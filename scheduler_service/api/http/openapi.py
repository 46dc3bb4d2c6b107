"""The description of the HTTP API, as an OpenAPI document and as an HTML page. Both are generated from the types of the
requests and answers."""

import html
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from pagewire.common import __version__
from scheduler_service.api.http.answers import Models
from scheduler_service.api.http.refusals import ErrorAnswer
from scheduler_service.api.http.transport.event_stream import EVENTS, Framing

_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"
# Values that an unsupported field accepts, because they have no effect.
_NEUTRAL = ("null", "''", "false", "empty list", "empty object")
_NOUN = re.compile("^(string|integer|number|boolean|object|list)")
# Path suffixes of routes that never stream their answers, although their request types have the field `stream`.
_UNSTREAMED = ("/render", "/input_tokens", "/compact", "/apply-template")


@dataclass(frozen=True, slots=True)
class TypedRoute:
    """A route of the HTTP API whose requests are decoded into a msgspec type. A request is the JSON body of an HTTP
    call, or the parameters of its path and query.

    Attributes:
        serve: The function that answers a call. Its arguments are the decoded request, the HTTP call, the call's event
            stream and the `Routes`. It returns the JSON of the answer, or None if the answer was streamed.
        framing: The format of streamed answers.
    """

    path: str
    request: type[Struct]
    answer: Any
    serve: Callable[..., Awaitable[bytes | None]]
    summary: str
    method: str = "POST"
    framing: Framing = EVENTS

    @property
    def is_named(self) -> bool:
        """Whether the request consists of path and query parameters and has no body. This is the case if the path has a
        parameter, such as `{request_id}`."""
        return "{" in self.path


_GOT = {
    "/v1/models": "List the names of the served model",
    "/health": "Report whether the server accepts requests: 200 if it does, otherwise 503",
    "/ping": "Alias of /health",
    "/version": "Return Pagewire's version",
    "/tokenizer_info": "Return the tokenizer's special tokens and the chat template",
    "/metrics": "Return the metrics of this front end, for operators",
    "/api/tags": "List the names of the served model, in the format of Ollama's API",
    "/api/ps": "Alias of /api/tags; the list is empty if no worker has loaded the model",
    "/api/version": "Alias of /version",
    "/props": "Return the model's properties and default settings, as llama-server does",
    "/slots": "Return the sequences that run, as llama-server does, for operators",
}


def document(routes: Sequence[TypedRoute], as_read: Callable[[type[Struct]], Any]) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of the HTTP API and return it as a JSON object. `as_read` maps the request type of
    a route to the type that the server decodes requests into. This type describes the request in the document."""
    kinds = [kind for route in routes for kind in (as_read(route.request), route.answer)]
    schemas, components = msgspec.json.schema_components([*kinds, Models, ErrorAnswer], ref_template=_REFERENCE)
    models, error = schemas[-2:]
    refused = {"default": {"description": "The request was refused", "content": {_JSON: {"schema": error}}}}
    paths: dict[str, Any] = {}
    for route, request, answer in zip(routes, schemas[0:-2:2], schemas[1:-2:2], strict=True):
        content = {_JSON: {"schema": answer}}
        if "stream" in route.request.__struct_fields__ and not route.path.endswith(_UNSTREAMED):
            content[route.framing.content_type.partition(";")[0]] = {"schema": answer}
        given: dict[str, Any] = {"requestBody": {"required": True, "content": {_JSON: {"schema": request}}}}
        if route.is_named:
            schema = components[route.request.__name__]
            given = {
                "parameters": [
                    {"name": name, "in": "query" if "default" in field else "path", "required": "default" not in field}
                    | {"schema": field}
                    for name, field in schema["properties"].items()
                ]
            }
        paths.setdefault(route.path, {})[route.method.lower()] = {
            "summary": route.summary,
            **given,
            "responses": {"200": {"description": "OK", "content": content}, **refused},
        }
    for route in filter(lambda route: route.is_named, routes):
        components.pop(route.request.__name__, None)
    for path, summary in _GOT.items():
        content = {_JSON: {"schema": models}} if path == "/v1/models" else {}
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": "OK", "content": content}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pagewire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A row in the table of request fields in the API documentation. It contains the name of a field, the accepted
    values and a note."""

    name: str
    takes: str  # the accepted values; empty if the field accepts only null
    note: str
    is_required: bool


def field_rows(kind: type[Struct]) -> Iterator[FieldRow]:
    """Yield the rows of the documentation table for a request type, one row for each field. Required fields come
    first."""
    (_,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    schema = components[kind.__name__]
    required = schema["required"]
    fields = schema["properties"].items()
    for name, field in sorted(fields, key=lambda item: item[0] not in required):
        takes = alternatives(each for each in accepted_values(field) if each not in _NEUTRAL)
        yield FieldRow(name, takes, note(field), name in required)


def page(routes: Sequence[TypedRoute]) -> str:
    """Build the HTML page `/docs` and return it. The page lists the HTTP routes and the fields of their requests. It
    loads no scripts, styles or images from other addresses."""
    parts = [_HEAD]
    for route in routes:
        parts.append(f"<h2><code>{route.method} {route.path}</code></h2><p>{html.escape(route.summary)}.</p><table>")
        for row in field_rows(route.request):
            name = f"<b>{row.name}</b>" if row.is_required else row.name
            text = row.note if row.takes else f"not supported: {row.note}"
            cells = (f"<code>{name}</code>", html.escape(row.takes), html.escape(text))
            parts.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        parts.append("</table>")
    parts += [f"<h2><code>GET {path}</code></h2><p>{html.escape(summary)}.</p>" for path, summary in _GOT.items()]
    return "\n".join(parts)


_HEAD = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Pagewire's HTTP API</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
td{{padding:.1rem 1rem .1rem 0;vertical-align:top}}</style>
<h1>Pagewire {__version__}</h1><p>Also available as <a href="openapi.json">OpenAPI</a>. Fields in bold are required. A
field that is null counts as unset.</p>"""


def alternatives(texts: Iterable[str]) -> str:
    """Join texts to a phrase such as "a, b or c". Repeated texts are left out."""
    *most, last = dict.fromkeys(texts) or ("",)
    return f"{', '.join(most)} or {last}" if most else last


def accepted_values(field: Mapping[str, Any], name_of: Callable[[str], str] = str) -> Iterator[str]:
    """Yield a short description of each kind of value that a JSON Schema accepts, such as "number from 0 to 1".
    `name_of` converts the name of a type of objects to the text that describes these objects."""
    match field:
        case {"anyOf": options}:
            for option in options:
                yield from accepted_values(option, name_of)
        case {"$ref": name}:
            yield name_of(name)
        case {"enum": values}:
            yield from (repr(value) if isinstance(value, str) else json.dumps(value) for value in values)
        case {"maxItems": 0}:
            yield "empty list"
        case {"maxProperties": 0}:
            yield "empty object"
        case {"type": "array"}:
            each_item = accepted_values(item_schema(field), name_of)
            items = alternatives(_NOUN.sub(r"\g<0>s", each) for each in each_item)
            yield f"list of {_limits(field, 'Items')}{f'({items})' if ' or ' in items else items}"
        case {"type": "string"}:
            length = _limits(field, "Length")
            pattern = f" that matches {field['pattern']}" if "pattern" in field else ""
            yield f"string{length and f' of {length}characters'}{pattern}"
        case {"exclusiveMinimum": low, "type": kind}:
            yield f"{kind} above {low}" + (f" to {field['maximum']}" if "maximum" in field else "")
        case {"type": kind}:
            entries = _limits(field, "Properties")
            limits = _limits(field, "imum") or (entries and f"{entries}entries")
            yield f"{kind} {'of' if 'or' in limits or 'up' in limits else 'from'} {limits}".rstrip() if limits else kind
        case _:
            yield "any JSON"


def item_schema(field: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of the items of a list. A list of fixed length has `prefixItems`, and no other items."""
    fixed: Mapping[str, Any] = {"anyOf": field["prefixItems"]} if "prefixItems" in field else {}
    return field.get("items") or fixed


def _limits(field: Mapping[str, Any], name: str) -> str:
    """Return the text of a lower and an upper limit in a JSON Schema, such as "1 to 5 ", or an empty text. `name`
    selects the limits: for example, "Items" selects `minItems` and `maxItems`."""
    low, high = field.get(f"min{name}"), field.get(f"max{name}")
    if low is None:
        return "" if high is None else f"up to {high} "
    return f"{low} or more " if high is None else f"{low} to {high} " if low < high else f"{low} "


def note(field: Mapping[str, Any]) -> str:
    """Return the description of a request field: its effect, or the reason why it is not supported. `field` is the JSON
    Schema of the field."""
    found = [field.get("description", "")] + [option.get("description", "") for option in field.get("anyOf", ())]
    return next(filter(None, found), "")
