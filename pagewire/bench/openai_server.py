"""A client of servers with the OpenAI API: streamed completions and chat completions, a connection for each request.

It is made of asyncio's streams alone, since a client that measures must cost little beside the server it measures.
"""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc

from pagewire.bench.run import Chunk
from pagewire.completion import Usage
from pagewire.errors import CommandError, PagewireError
from pagewire.sampling_params import BENCH_FIELDS, SamplingParams

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"
MAX_LINE_BYTES = 1 << 20
MAX_ERROR_CHARS = 500
CONNECT_TIMEOUT_S = 30.0
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
# Fields of SamplingParams that OpenAI's API has by the same name, or that its servers commonly add to it.
_SAMPLING_FIELDS = ("max_tokens", *BENCH_FIELDS)


class HttpError(PagewireError):
    """A request was not answered, or not with success. The text says what the server said."""


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    headers: Mapping[str, str]
    reader: asyncio.StreamReader


class OpenAIServer:
    """A server with the OpenAI API. `model` is its name for requests. Its methods raise HttpError."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        *,
        model: str = "",
        api_key: str | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        """Connects to nothing yet. Raises ValueError for a text that is no url."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{base_url!r} is no address of a server, such as http://127.0.0.1:8000")
        self.url = base_url.rstrip("/")
        self.model = model
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._endpoint = endpoint
        self._is_chat = endpoint.rstrip("/").endswith("chat/completions")
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._extra_body = dict(extra_body or {})

    async def models(self) -> list[str]:
        """Returns the names of the models that the server has, or nothing if it does not say. Raises CommandError if
        none answers."""
        try:
            async with self._exchange("GET", "/v1/models", None) as response:
                content = b"".join([part async for part in _body(response)])
        except HttpError as error:
            raise CommandError(str(error)) from None
        try:
            return [entry["id"] for entry in json.loads(content)["data"]] if response.status == 200 else []
        except (ValueError, LookupError, TypeError):
            return []

    async def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of an answer to a text. Token ids and salts are not part of the API, and not sent."""
        assert prompt is not None, "only texts are sent"
        assert sampling is not None
        body = self._request(prompt, sampling)
        headers = {} if request_id is None else {"X-Request-Id": request_id}
        async with self._exchange("POST", self._endpoint, body, headers) as response:
            if response.status != 200:
                raise await _refusal(response)
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise HttpError(f"{self.url}{self._endpoint} does not stream: its answer is {kind or 'of no type'}")
            async with contextlib.aclosing(_events(response)) as events:
                async for event in events:
                    yield _chunk(event)

    def _request(self, prompt: str, sampling: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
        body |= {name: value for name, value in values.items() if value is not None}
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        return body | self._extra_body

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: dict[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[_Response]:
        """Sends a request and gives the block its response, whose body is to be read there."""
        connecting = asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES)
        try:
            reader, writer = await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S)
        except OSError as error:
            raise self._failure(path, error) from None
        try:
            content = b"" if body is None else json.dumps(body).encode()
            all_headers = {**self._headers, **(headers or {}), "Content-Length": len(content), "Connection": "close"}
            lines = [f"{method} {self._prefix}{path} HTTP/1.1", *(f"{name}: {v}" for name, v in all_headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
            await writer.drain()
            yield await _read_head(reader)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._failure(path, error) from None
        finally:
            writer.close()

    def _failure(self, path: str, error: Exception) -> HttpError:
        reason = str(error) or type(error).__name__
        return HttpError(f"cannot talk to {self.url}{path}: {reason}", code=grpc.StatusCode.UNAVAILABLE)


async def _read_head(reader: asyncio.StreamReader) -> _Response:
    """Reads the status line and the headers. Raises ValueError for an answer that is not HTTP/1.1."""
    line = (await reader.readuntil(b"\n")).decode("latin-1")
    version, _, rest = line.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"it does not speak HTTP/1.1, but begins with {line.strip()!r}")
    headers: dict[str, str] = {}
    while header := (await reader.readuntil(b"\n")).decode("latin-1").strip():
        name, _, value = header.partition(":")
        headers[name.strip().lower()] = value.strip()
    return _Response(int(rest[:3]), headers, reader)


async def _body(response: _Response) -> AsyncGenerator[bytes, None]:
    """Yields the parts of a body as they come."""
    reader = response.reader
    if response.headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\n")).partition(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    num_left = int(response.headers.get("content-length", -1))
    while num_left:
        part = await reader.read(1 << 16 if num_left < 0 else min(num_left, 1 << 16))
        if not part:
            if num_left > 0:
                raise EOFError(f"the connection broke {num_left} bytes before the end")
            return
        num_left -= len(part) if num_left > 0 else 0
        yield part


async def _events(response: _Response) -> AsyncGenerator[dict[str, Any], None]:
    """Yields the objects of server-sent events, up to `[DONE]`. Raises EOFError if that does not come and nothing has
    finished."""
    rest = b""
    has_finished = False
    async with contextlib.aclosing(_body(response)) as body:
        async for part in body:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                has_finished |= any(choice.get("finish_reason") for choice in event.get("choices") or ())
                yield event
    if not has_finished:
        raise EOFError("the stream ended before its last event")


def _chunk(event: Mapping[str, Any]) -> Chunk:
    """Makes a chunk of an event. Raises HttpError for an event that tells of a failure."""
    if "error" in event:
        raise HttpError(_message(event) or json.dumps(event)[:MAX_ERROR_CHARS])
    texts = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        texts += [choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning")]
    usage = event.get("usage")
    if usage is None:
        return Chunk(any(texts), None)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Chunk(any(texts), Usage(usage["prompt_tokens"], cached, usage["completion_tokens"]))


async def _refusal(response: _Response) -> HttpError:
    content = b"".join([part async for part in _body(response)])
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = ""
    text = message or " ".join(content.decode(errors="replace").split())[:MAX_ERROR_CHARS]
    code = _CODES.get(response.status, grpc.StatusCode.UNKNOWN)
    return HttpError(f"HTTP {response.status}: {text}", code=code)


def _message(body: Any) -> str:
    """Returns the text of an OpenAI error, or nothing if its form is unknown."""
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
