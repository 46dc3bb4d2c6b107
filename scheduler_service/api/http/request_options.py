"""Conversion of the options of HTTP requests into sampling options. Refusals get the field names that the request
uses."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Raw

from pagewire.common.wire.sampling_rules import Options
from scheduler_service.api.http.requests import (
    READINGS,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    QueuedRequest,
    SampledRequest,
    StructuralTagFormat,
    ValueFormat,
)
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.parsed_request import ParsedRequest, Truncation, check_token_id, parse_request
from scheduler_service.serving.refusal import RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

_SAME = (*SampledRequest.__annotations__, "n", "prompt_logprobs", "beam_width", "length_penalty")
_NULL = b"null"
# The field names of SGLang and llama-server, by the kind of constraint.
_TOP_LEVEL = {"regex": ["regex"], "grammar": ["ebnf", "grammar"], "json": ["json_schema"]}
_MAX_BAD_WORDS = 1024
_PARENT = "sampling."  # prefix of field paths; the HTTP requests have these fields at the top level
_LISTS_OF_TOKENS = "token_ids.ids"
# A constraint on an output: the name of the request's field, the kind of constraint, and its value.
OutputConstraint = tuple[str, str, Any]


class RequestNames:
    """The field names of one kind of HTTP request. Some APIs have their own names for common options, such as
    `max_output_tokens` for `max_tokens`. Error messages use the names that the client knows."""

    def __init__(self, prompt: str, **options: str) -> None:
        """Create the field names of one kind of HTTP request. `prompt` is the name of the field that contains the
        prompt. `options` maps the common name of an option to its name in this kind of request. An option that is not
        in `options` has its common name."""
        self._prompt = prompt
        self._options = options

    @contextlib.contextmanager
    def translate_refusals(self) -> Iterator[None]:
        """Return a context manager that corrects the field names in errors. If its `with` block raises RefusedError, it
        raises the error again with the field name of this kind of HTTP request, also in the message."""
        try:
            yield
        except RefusedError as refusal:
            field = refusal.field.removeprefix(_PARENT)
            if field == "text" or field.startswith(_LISTS_OF_TOKENS):
                field = self._prompt
            name, bracket, place = field.partition("[")
            own = self._options.get(name, name)
            # A name without an underscore may also be a word of the message.
            named = rf"{'' if '_' in name else '^'}(?:{_PARENT})?\b{name}\b"
            message = re.sub(named, own, str(refusal)) if own != name else str(refusal).removeprefix(_PARENT)
            raise RefusedError(refusal.reason, message, own + bracket + place, refusal.overflow) from None


class DecodedCall(NamedTuple):
    """The generation or embedding requests of one HTTP call, one request for each prompt. It also contains the id of
    the answer and the field names for error messages."""

    requests: list[ParsedRequest]
    answer_id: str
    names: RequestNames
    echoes: bool = False  # each output begins with its prompt
    shows_tokens: bool = False  # the answer contains token ids of prompts and outputs
    embedding_bytes: int = 0  # estimated size of each embedding in the answer


def sampling_options(
    request: GenerationRequest, model: ModelInfo, grammars: Iterable[OutputConstraint]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Collect the sampling options of a request. `grammars` are the constraints on the output, except
    `allowed_token_ids` and `bad_words`, which are added here. Raises RefusedError if there is more than one constraint.

    Returns the options, keyed by their common names, and the request field that sets the output constraint, keyed by
    the kind of constraint.
    """
    set_fields = ((name, value) for name in _SAME if (value := getattr(request, name)) is not None)
    options: dict[str, Any] = {name: READINGS[name](value) if name in READINGS else value for name, value in set_fields}
    if request.logprob_token_ids:
        options["logprob_token_ids"] = request.logprob_token_ids
    if request.use_beam_search:
        options.setdefault("beam_width", request.n or 1)
    elif "beam_width" not in options and request.length_penalty == 1:
        del options["length_penalty"]
    found = [*grammars, *_token_constraints(request, model)]
    if len(found) > 1:
        (first, *_), (second, *_) = found[:2]
        raise invalid(second, f"{first} and {second} both constrain the output; send only one of them")
    names = {}
    for field, kind, value in found:
        options[kind], names[kind] = value, field
    return options, names


def request_for_prompt(
    request: QueuedRequest,
    prompt: str | tuple[int, ...],
    options: Options | None,
    call: Call,
    model: ModelInfo,
    *,
    request_id: str,
    add_special_tokens: bool = True,
    default_max_tokens: int | None = None,
) -> ParsedRequest:
    """Build the generation request for one prompt of an HTTP call. Raises RefusedError if a field is invalid.

    Args:
        request: The decoded HTTP request.
        prompt: The text or the token ids of the prompt.
        options: The sampling options, or None to request an embedding.
        call: The HTTP call.
        model: The served model.
        request_id: The id of the generation request.
        add_special_tokens: Whether to add special tokens to the prompt if the HTTP request does not set this field.
        default_max_tokens: The maximum output length in tokens if `options` sets no maximum.
    """
    truncation = None
    if (most := request.truncate_prompt_tokens) is not None:
        truncation = Truncation(None if most < 0 else most, keeps_first=request.truncation_side == "right")
    return parse_request(
        prompt,
        options,
        call,
        model,
        request_id=request_id,
        tenant=request.tenant or "",
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        session_id=request.session_id or "",
        will_return=request.will_return,
        retention_seconds=request.retention_seconds,
        add_special_tokens=add_special_tokens if request.add_special_tokens is None else request.add_special_tokens,
        default_max_tokens=default_max_tokens,
        truncation=truncation,
    )


def output_constraints(request: GenerationRequest) -> Iterator[OutputConstraint]:
    """Yield the constraints on the output that a request sets in `response_format`, `structured_outputs` and the
    aliases of these fields. `allowed_token_ids` and `bad_words` are left to `_token_constraints`. Raises RefusedError
    if a schema is not UTF-8."""
    match request.response_format:
        case JsonObjectFormat(schema=schema) if schema is UNSET or bytes(schema) == _NULL:
            yield "response_format", "json_object", True
        case (
            JsonObjectFormat(schema=Raw() as schema)
            | ValueFormat(value=schema)
            | JsonSchemaFormat(json_schema=NamedSchema(schema=schema))
        ):
            yield "response_format", "json_schema", _text(schema, "response_format")
        case StructuralTagFormat() as tag:
            parts = {name: value for name in tag.__struct_fields__ if (value := getattr(tag, name)) is not UNSET}
            text = Raw(msgspec.json.encode({"type": "structural_tag", **parts}))
            yield "response_format", "structural_tag", _text(text, "response_format")
    for kind in ("json", "regex", "choice", "grammar", "structural_tag", "json_object"):
        for field, value in (
            *((name, getattr(request, name, None)) for name in (f"guided_{kind}", *_TOP_LEVEL.get(kind, ()))),
            (f"structured_outputs.{kind}", getattr(request.structured_outputs, kind, None)),
        ):
            if isinstance(value, Raw):
                if bytes(value) != _NULL:
                    yield field, "json_schema", _text(value, field)
            elif value is not None and value is not UNSET and value is not False:
                yield field, kind, value


def _token_constraints(request: GenerationRequest, model: ModelInfo) -> Iterator[OutputConstraint]:
    """Convert the request fields `allowed_token_ids` and `bad_words` to Lark grammars, and yield each as a constraint
    on the output. Raises RefusedError if a list has too many entries, or an entry is invalid."""
    for field, limit in (("allowed_token_ids", model.vocab_size), ("bad_words", _MAX_BAD_WORDS)):
        if (count := len(getattr(request, field) or ())) > limit:
            raise invalid(field, f"{field} has {count} entries, at most {limit} are allowed; send fewer")
    if request.allowed_token_ids is not None:
        for position, token_id in enumerate(request.allowed_token_ids):
            check_token_id(f"allowed_token_ids[{position}]", token_id, model)
        # After a complete match, any end token may follow. So the grammar ends with an allowed end token, or never.
        ends = {*request.allowed_token_ids}.intersection(model.grammar_end_token_ids)
        others = {*request.allowed_token_ids}.difference(ends)
        parts = [f"<{sorted(others)}>{'*' if ends else ' start'}"] if others else []
        parts += [f"<{sorted(ends)}>"] if ends else []
        yield "allowed_token_ids", "grammar", f"start: {' '.join(parts)}".replace(", ", ",")
    if request.bad_words:
        if "" in request.bad_words:
            field = f"bad_words[{request.bad_words.index('')}]"
            raise invalid(field, f"{field} is '', but must be a string of 1 or more characters")
        words = " | ".join(map(json.dumps, request.bad_words))
        yield "bad_words", "grammar", f"start: TEXT\nANY: /(?s:.*)/\nTEXT: ANY & ~(ANY ({words}) ANY)"


def _text(schema: Raw, field: str) -> str:
    """Return a schema of a request as JSON text. A client may send the schema as a JSON object, or as a JSON string
    that contains the text of the object. `field` is the name of the request field, for errors. Raises RefusedError if
    the schema is not UTF-8."""
    try:
        text = bytes(schema).decode().strip()
        return msgspec.json.decode(text, type=str) if text.startswith('"') else text
    except UnicodeDecodeError:
        raise invalid(field, f"{field} is not valid UTF-8; encode the text as UTF-8") from None
