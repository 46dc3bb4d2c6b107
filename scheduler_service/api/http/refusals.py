"""Error answers: an HTTP status, and JSON with a message and, except in Ollama's API, the name of the invalid field."""

import re
from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from scheduler_service.serving.refusal import ContextOverflow, Reason, RefusedError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    501: "not_supported_error",  # as in llama-server
    503: "service_unavailable_error",
}
_CODES = {Reason.UNAUTHENTICATED: "invalid_api_key", Reason.RESOURCE_EXHAUSTED: "rate_limit_exceeded"}

_UNKNOWN_RESPONSE = (Reason.FAILED_PRECONDITION, "previous_response_id")


class Error(Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    details: dict[str, str] | UnsetType = UNSET


# After this error, Anthropic's client sends whole conversations instead of threads.
_NO_THREADS = {"error_code": "thread_unsupported_request"}


class ErrorAnswer(Struct, frozen=True):
    error: Error
    type: Literal["error"] | UnsetType = UNSET  # set by the Messages API only


class OllamaError(Struct, frozen=True):
    """An error answer of Ollama's API."""

    error: str


class HttpRefusal(Exception):
    """An error that ends an HTTP call with an HTTP status that RefusedError does not support, such as 413 for a large
    body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def error_answer(refusal: RefusedError | HttpRefusal, path: str) -> ErrorAnswer | OllamaError:
    """Build the JSON object of an error answer. The format depends on `path`, the path of the HTTP call: Ollama's
    format below `/api/`, Anthropic's format for the Messages API, and OpenAI's format otherwise."""
    path = re.sub("/+", "/", path)  # as the routes read it
    answer = detailed_error(refusal, path)
    return OllamaError(answer.error.message) if path.startswith("/api/") else answer


def detailed_error(refusal: RefusedError | HttpRefusal, path: str) -> ErrorAnswer:
    """Build the JSON object of an error answer in Anthropic's format if `path` belongs to the Messages API, and in
    OpenAI's format otherwise."""
    kind: Literal["error"] | UnsetType = "error" if path.startswith("/v1/messages") else UNSET
    if isinstance(refusal, HttpRefusal):
        return ErrorAnswer(Error(str(refusal), _type(refusal.status)), kind)
    code = "model_not_found" if refusal.field == "model" else _CODES.get(refusal.reason)
    if (refusal.reason, refusal.field) == _UNKNOWN_RESPONSE:
        code = "previous_response_not_found"
    message = str(refusal)
    if refusal.overflow is not None:
        code, message = "context_length_exceeded", f"{_overflow(refusal.overflow, path)}: {message}"
    details = _NO_THREADS if kind and refusal.field == "thread" else UNSET
    error = Error(message, _type(refusal.reason.http_status), refusal.field or None, code, details)
    return ErrorAnswer(error, kind)


def _overflow(overflow: ContextOverflow, path: str) -> str:
    """Return the first words of the error message for a prompt that exceeds the context length. Clients recognize this
    error by its first words. Anthropic's clients and OpenAI's clients expect different words, so the text depends on
    `path`, the path of the HTTP call."""
    most, number = overflow
    if path.startswith("/v1/messages"):
        return "prompt is too long" + ("" if number is None else f": {number} tokens > {most - 1} maximum")
    return f"this model's maximum context length is {most} tokens"


def error_response(refusal: RefusedError | HttpRefusal, path: str) -> Response:
    """Build the HTTP response for an error of a call to `path`. The response has the HTTP status of the error and a
    JSON body. For some errors, it has a header such as `retry-after`."""
    headers: dict[str, str] = {}
    if isinstance(refusal, HttpRefusal):
        status = refusal.status
    else:
        status = refusal.reason.http_status
        if refusal.reason.retry_delay_s:
            headers["retry-after"] = str(refusal.reason.retry_delay_s)
        if refusal.reason is Reason.UNAUTHENTICATED:
            headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(error_answer(refusal, path)), status, headers, media_type="application/json")


def _type(status: int) -> str:
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
