"""Decoding of HTTP request bodies into typed requests, within size limits. If a body is invalid, the error is one line
that names the field, its value and the accepted values."""

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, Struct, defstruct, field, structs
from starlette.types import Receive, Scope

from pagewire.common.strict_json import MAX_VALUES, count_values
from pagewire.common.surrogates import without_halves
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from scheduler_service.api.http.field_errors import SHOWN_CHARS, components, field_error, fields_of, structs_in
from scheduler_service.api.http.openapi import note
from scheduler_service.api.http.refusals import HttpRefusal
from scheduler_service.api.http.requests import INERT
from scheduler_service.serving.refusal import RefusedError, invalid
from scheduler_service.serving.turns import PIECE_SIZE, Turns

MAX_BODY_BYTES = MAX_MESSAGE_BYTES
BODY_TIMEOUT_S = 30.0
TOO_DEEP = "the body is nested too deeply; send fewer lists and objects inside each other"
_MAX_SHOWN_BYTES = 64 << 10  # limit of bodies that are decoded again to quote a value or path in an error
_HALF = "an unpaired surrogate, which is not a character; split texts only between characters"
# Fields of other servers and of proxies that have no effect on an answer.
_IGNORED_FIELDS = frozenset(
    {
        *("anthropic_beta", "anthropic_version", "api_key", "betas", "cache_prompt", "drop_params", "id_slot"),
        *("num_retries", "slot_id", "snippy", "tool_stream"),
        # parameters of llama-server's options that are off (see _NEUTRAL), of its cache and of its SSE comments
        *(
            "adaptive_decay",
            "dry_allowed_length",
            "dry_base",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "dynatemp_exponent",
        ),
        *("n_cache_reuse", "n_discard", "sse_ping_interval", "t_max_prompt_ms", "xtc_threshold"),
        # options with which Ollama loads a model, some of them in older versions only
        *("draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta"),
        *("mirostat_tau", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "use_mlock", "use_mmap"),
        "vocab_only",
    }
)
# Options of other APIs and servers, with the values that have no effect on an answer.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("best_of", "n", "repeat_penalty", "repetition_penalty", "tfs_z", "typical_p"), 1),
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "frequency_penalty", "min_p", "mirostat", "n_keep"), 0),
    **dict.fromkeys(("min_keep", "presence_penalty", "xtc_probability"), 0),
    **dict.fromkeys(("do_sample", "incremental_output", "normalized", "parse_tool_calls", "penalize_newline"), True),
    **dict.fromkeys(("enable_search", "late_chunking", "logprobs", "return_progress", "safe_prompt"), False),
    **dict.fromkeys(("timings_per_token", "vl_high_resolution_images"), False),
    **dict.fromkeys(("password", "system", "template", "username"), ""),
    **{"embedding_type": "float", "extra_body": {}, "options": {}, "plugins": [], "result_format": "message"},
    **{"adaptive_target": -1, "lora": [], "top_n_sigma": -1, "transforms": []},
}
_Request = TypeVar("_Request", bound=Struct)


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """Return the whole body of an HTTP call. Raises HttpRefusal if the body is compressed, exceeds MAX_BODY_BYTES or
    does not arrive within BODY_TIMEOUT_S seconds. Raises HttpRefusal also if the client disconnects before the body is
    complete."""
    headers = scope["header_values"]
    encoding = headers.get(b"content-encoding") or "identity"
    if encoding.lower() != "identity":
        raise HttpRefusal(415, f"the body has the unsupported encoding {encoding[:SHOWN_CHARS]!r}; send it unencoded")
    length = headers.get(b"content-length", "0")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise _too_large(int(length))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise HttpRefusal(400, "the client has disconnected")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large(len(body))
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise HttpRefusal(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again") from None


def _too_large(num_bytes: int) -> HttpRefusal:
    return HttpRefusal(413, f"the body has {num_bytes} bytes or more; the limit is {MAX_BODY_BYTES}; shorten it")


async def decode_in_turn(body: bytes, kind: type[_Request], tenant: str, turns: Turns) -> tuple[_Request, int]:
    """Decode the JSON body of an HTTP call. A large body is decoded on a thread, which the tenants use in turn.

    Returns the decoded request, and the cost of processing it. The cost of a body larger than PIECE_SIZE is its number
    of bytes. The cost of a smaller body is its number of bytes or its number of JSON values, whichever is larger.
    Raises RefusedError if the body is invalid.
    """
    size = len(body) if len(body) > PIECE_SIZE else max(len(body), count_values(body))
    return await turns.run_in_turn(tenant, size, decode_body, body, kind), size


def decode_body(body: bytes, kind: type[_Request]) -> _Request:
    """Decode the JSON body of an HTTP call into a request of type `kind`. Raises RefusedError if the body is not valid
    JSON, has more than MAX_VALUES values, or does not match `kind`."""
    if (number := count_values(body)) > MAX_VALUES:
        raise invalid(
            "",
            f"the body has at least {number} values; the limit is {MAX_VALUES}; send fewer (a text counts as 4, a list "
            "or object as 6, a number with a fraction as 15, a number with an exponent as 500, and each 20 digits in a "
            "row as 30 more)",
        )
    try:
        try:
            # A type of `lenient` would ignore other names of its fields, which `_normalized` replaces.
            is_exact = kind.__struct_config__.forbid_unknown_fields
            decoded = _decoder(kind).decode(body) if is_exact else _decode_normalized(body, kind)
        except msgspec.ValidationError:
            decoded = _decode_normalized(body, kind)
        # Do not keep the unread fields of a large request in memory.
        return structs.replace(decoded, **_unset_inert(kind)) if len(body) > PIECE_SIZE else decoded
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if rb"\ud" in body.lower():
            raise _undecodable_refusal(body) from None
        reason = str(error).removeprefix("JSON is malformed: ")
        raise invalid("", f"the body is not valid JSON: {reason}; send one JSON object in UTF-8") from None
    except RecursionError:
        raise invalid("", TOO_DEEP) from None


def _decode_normalized(body: bytes, kind: type[_Request]) -> _Request:
    """Decode a JSON request body that `kind` does not accept: convert it to the form that `kind` accepts, and decode
    the result. `_normalized` describes the conversions. Raises RefusedError if the result is invalid."""
    given = read = UNSET
    with contextlib.suppress(msgspec.ValidationError):  # a number that is too large
        given = msgspec.json.decode(body)
        read = _normalized(given, kind)
    try:
        return _decoder(kind).decode(body if read is UNSET else msgspec.json.encode(read))
    except msgspec.ValidationError as error:
        raise field_error(str(error), given, read, kind) from None


def _normalized(value: Any, hint: Any) -> Any:
    """Convert a JSON value of a request body into the form that the type `hint` accepts. So the server accepts more
    requests that were written for other APIs and servers.

    - An unknown field is removed if its value has no effect on an answer.
    - false becomes null in a field that accepts null but no boolean.
    - An empty value becomes null in a field that accepts only null.
    - A float without a fraction becomes an integer where no float is accepted, because many languages have floats as
      their only numbers.
    - An object in the format of another API is converted by the static method `normalize_json` of the expected struct.
    """
    parts = _parts(hint)
    is_off = value is False and not any(part is bool or isinstance(part, bool) for part in parts)
    if NoneType in parts and (
        is_off or (value in ("", [], {}) and all(part is NoneType or isinstance(part, Meta) for part in parts))
    ):
        return None
    if isinstance(value, list):
        return [_normalized(each, hint) for each in value]
    if isinstance(value, dict) and (kinds := list(structs_in(hint))):
        tagged = [kind for kind in kinds if (config := kind.__struct_config__).tag == value.get(config.tag_field)]
        tagged = tagged or kinds
        if len(tagged) == 1:
            value = getattr(tagged[0], "normalize_json", dict)(value)
        known = {name: inner for kind in tagged for name, inner in fields_of(kind).items()}
        return {
            name: _normalized(inner, known.get(name))
            for name, inner in value.items()
            if name in known or not _has_no_effect(name, inner)
        }
    is_whole = isinstance(value, float) and value.is_integer() and int in parts and float not in parts
    return int(value) if is_whole else value


def _has_no_effect(name: str, value: Any) -> bool:
    """Return whether the server may ignore an unknown request field, because a field with this name and value has no
    effect on the answer."""
    return value is None or name in _IGNORED_FIELDS or value == _NEUTRAL.get(name)


@functools.cache
def _parts(hint: Any) -> frozenset[Any]:
    """Return all types and literal values inside a type hint. For example, the parts of `int | None` are `int` and
    `NoneType`."""
    return frozenset().union(*map(_parts, inner)) if (inner := get_args(hint)) else frozenset([hint])


def _undecodable_refusal(body: bytes) -> RefusedError:
    """Return the error for a request body that cannot be decoded. Either the body is not valid JSON, or a string in it
    has an unpaired surrogate escape such as `\\ud800`. If the body has at most _MAX_SHOWN_BYTES bytes, the error names
    the path of that string."""
    with contextlib.suppress(ValueError, RecursionError):
        for path in _paths_of_halves(json.loads(body), "") if len(body) <= _MAX_SHOWN_BYTES else ():
            return invalid(path, f"{path or 'the body'} has {_HALF}")
    return invalid("", f"the body is not valid JSON, or a text in it has {_HALF}")


def _paths_of_halves(value: Any, path: str) -> Iterator[str]:
    """Yield the path of each string in a JSON value that has an unpaired surrogate."""
    if isinstance(value, str) and without_halves(value) != value:
        yield path.removeprefix(".")
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _paths_of_halves(name, path)
        yield from _paths_of_halves(inner, f"{path}.{name[:SHOWN_CHARS]}")
    for index, inner in enumerate(value if isinstance(value, list) else ()):
        yield from _paths_of_halves(inner, f"{path}[{index}]")


def decode_query(values: Mapping[str, str], kind: type[_Request]) -> _Request:
    """Convert the parameters of a URL's path and query to a request of type `kind`. Raises RefusedError if a parameter
    is unknown, missing or invalid."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise field_error(str(error), values, values, kind) from None


def lenient(kind: Any) -> Any:
    """Return a copy of a request type that ignores unknown fields in the request and in its nested objects. The server
    decodes requests into the copy if it runs with `--lenient`. The original types refuse requests with unknown
    fields."""
    origin: Any = Union if get_origin(kind) is UnionType else get_origin(kind)
    if origin is not None:  # lists and Annotated types too
        return origin[tuple(map(lenient, get_args(kind)))]
    return _lenient_struct(kind) if isinstance(kind, type) and issubclass(kind, Struct) else kind


@functools.cache  # the OpenAPI document needs one type for each struct, wherever the struct is used
def _lenient_struct(kind: type[Struct]) -> type[Struct]:
    fields = [
        (each.name, lenient(each.type), field(default=each.default, name=each.encode_name))
        for each in structs.fields(kind)
    ]
    return defstruct(
        kind.__name__, fields, bases=(kind,), forbid_unknown_fields=False, frozen=True, kw_only=True, module=__name__
    )


@functools.cache
def _decoder(kind: type[_Request]) -> "msgspec.json.Decoder[_Request]":
    return msgspec.json.Decoder(kind)


@functools.cache
def _unset_inert(kind: type[Struct]) -> Mapping[str, Any]:
    """Return the default value of each request field that has no effect on the answer, keyed by field name.
    `decode_body` resets these fields in large requests, to release their memory."""
    described = components(kind)[kind.__name__]["properties"]
    return {each.name: each.default for each in structs.fields(kind) if note(described[each.encode_name]) == INERT}
