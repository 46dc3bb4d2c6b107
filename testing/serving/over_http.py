"""Requests of the client library, sent over HTTP, with the answers converted to the library's outputs."""

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2 as httpx

from pagewire import SamplingParams, Session
from pagewire.client.completion import Output, TokenLogprobs
from pagewire.client.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    PagewireError,
    Unavailable,
)
from testing.serving.received import Received, Sample

COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
DONE = "[DONE]"
_ERRORS: dict[int, type[PagewireError]] = {
    400: InvalidRequest,
    404: NotFound,
    499: Cancelled,
    500: InternalError,
    503: Unavailable,
    504: DeadlineExceeded,
}
# Grammar options: the names in the proto, and the names in HTTP.
_GRAMMARS = {"json_schema": "json"} | {
    name: name for name in ("json_object", "regex", "choice", "grammar", "structural_tag")
}
_LOWEST = -9999.0  # the value that HTTP uses for a log-probability of minus infinity


def is_expressible(arguments: Mapping[str, Any]) -> bool:
    """Return whether the HTTP API supports all these arguments of `AsyncClient.stream`."""
    sampling = arguments.get("sampling")
    return sampling is None or sampling.early_stopping in (None, False, "heuristic")


def body_of(arguments: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the body of a completion request, or of an embeddings request if there is no `sampling`.

    `fields` are added to the body.
    """
    prompt = arguments.get("prompt", arguments.get("prompt_token_ids"))
    sampling: SamplingParams | None = arguments.get("sampling")
    body = {name: arguments[name] for name in ("priority", "cache_salt", "tenant") if name in arguments}
    if sampling is None:
        return body | {"input": prompt, "encoding_format": "float"} | fields
    body |= {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True} | _options_of(sampling)
    session: Session | None = arguments.get("session")
    if session is not None:
        named = {"will_return": session.will_return, "retention_seconds": session.retention_seconds}
        body |= {"session_id": session.id, **{name: value for name, value in named.items() if value is not None}}
    return body | fields


def _options_of(sampling: SamplingParams) -> dict[str, Any]:
    options = dict(sampling.options)
    options.pop("early_stopping", None)
    if options.get("seed", 0) >= 1 << 63:
        options["seed"] -= 1 << 64  # the HTTP API has a signed seed
    structured = {kind: options.pop(name) for name, kind in _GRAMMARS.items() if name in options}
    return options | ({"structured_outputs": structured} if structured else {})


async def outputs_over_http(
    client: httpx.AsyncClient, arguments: Mapping[str, Any], *, is_streamed: bool, **fields: Any
) -> AsyncGenerator[Output, None]:
    """Send a request, and yield its outputs: the content of each event of a stream, or whole samples.

    Raises PagewireError if the request fails.
    """
    body = body_of(arguments, **fields)
    if "input" in body:
        answer = _content(await client.post(EMBEDDINGS, json=body))
        (item,) = answer["data"]
        yield _output(answer, {"index": 0, "finish_reason": "stop"}, 0, tuple(item["embedding"]))
        return
    counts: dict[int, int] = {}
    async with contextlib.aclosing(_answers(client, body | {"stream": is_streamed})) as answers:
        async for answer in answers:
            for choice in answer["choices"]:
                first = counts.get(choice["index"], 0)
                yield _output(answer, choice, first)
                counts[choice["index"]] = first + len(choice.get("token_ids") or ())


async def _answers(client: httpx.AsyncClient, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a stream, which must end correctly, or the whole answer."""
    if not body["stream"]:
        yield _content(await client.post(COMPLETIONS, json=body))
        return
    async with client.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != 200:
            await response.aread()
            _content(response)
        is_done = False
        async for line in response.aiter_lines():
            assert not (is_done and line), "data follows the end of a stream"
            if not line.startswith("data: "):
                continue
            if is_done := line == f"data: {DONE}":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _error(event["error"])
            yield event
        assert is_done, "a stream ended without [DONE]"


def _content(response: httpx.Response) -> dict[str, Any]:
    if response.status_code != 200:
        raise _ERRORS[response.status_code](response.json()["error"]["message"])
    return response.json()


def _error(error: Mapping[str, Any]) -> PagewireError:
    """Return the error that an event of a stream reports.

    It has no status code, but its text equals the text over gRPC.
    """
    kind = DeadlineExceeded if "timeout" in error["message"] else InternalError
    return kind(error["message"])


def _output(
    answer: Mapping[str, Any], choice: Mapping[str, Any], first_token: int, embedding: tuple[float, ...] = ()
) -> Output:
    return Output(
        answer.get("id", ""),
        choice["index"],
        tuple(choice.get("token_ids") or ()),
        choice.get("text", ""),
        choice["finish_reason"],
        _logprobs_of(choice.get("logprobs")),
        None,
        _prompt_logprobs_of(choice.get("prompt_logprobs")) if choice["index"] == 0 else None,  # in all choices
        None,
        first_token,
        choice.get("stop_reason"),
        embedding,
    )


def _logprobs_of(columns: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    if columns is None:
        return None
    rows = zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True)
    return tuple(
        (id_of(token), logprob, {id_of(other): value for other, value in top.items()}) for token, logprob, top in rows
    )


def id_of(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _prompt_logprobs_of(entries: list[Any] | None) -> tuple[Any, ...] | None:
    """Return the log-probabilities from the second token on. The first token has no log-probability."""
    if entries is None:
        return None
    assert entries[0] is None
    return tuple(
        {int(token_id): (each["logprob"], each["rank"]) for token_id, each in entry.items()} for entry in entries[1:]
    )


def as_over_http(received: Received, arguments: Mapping[str, Any]) -> Received:
    """Return an output that was received over gRPC in the form that HTTP would give it."""
    sampling: SamplingParams | None = arguments.get("sampling")
    shown = Received(error=received.error and (received.error[0], ""))
    stops = set(sampling.stop_token_ids or ()) if sampling is not None else set()
    for index, sample in received.samples.items():
        end = None
        if sample.end is not None:
            reason, stop, _, embedding = sample.end
            is_own = not isinstance(stop, int) or stop in stops  # HTTP does not report an end token
            end = (reason, stop if is_own else None, None, embedding)
        shown.samples[index] = Sample(
            sample.token_ids, list(map(_logprob_over_http, sample.logprobs)), sample.text, end
        )
    shown.prompt_logprobs = list(map(_prompt_logprob_over_http, received.prompt_logprobs))
    return shown


def _logprob_over_http(entry: TokenLogprobs) -> tuple[int, float, dict[int, float]]:
    top = {entry.token_id: entry.logprob} | dict(entry.top)
    return entry.token_id, _finite(entry.logprob), {token_id: _finite(logprob) for token_id, logprob in top.items()}


def _prompt_logprob_over_http(entry: TokenLogprobs) -> dict[int, tuple[float, int]]:
    ranked = {token_id: (_finite(logprob), rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)}
    return {entry.token_id: (_finite(entry.logprob), entry.rank)} | ranked


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
