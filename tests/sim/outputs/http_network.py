"""The HTTP API of a simulated front end without sockets: ASGI calls over a network that delays and breaks them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random
from typing import Any
from unittest import mock

from pagewire.client.wire import decode_failure
from pagewire.common.wire.transport.host_names import HostNames
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.request_servicer import RequestServicer
from scheduler_service.api.http.call_admission import CallAdmission, Origins
from scheduler_service.api.http.routes import Routes
from scheduler_service.api.http.transport.http_server import HttpServer
from scheduler_service.links.scheduler.scheduler_link import SchedulerLink
from scheduler_service.serving.refusal import Reason
from tests.sim.outputs.network import Network, Pipe, Status, StatusCode
from tests.sim.outputs.request import EOS, SimulatedRequest

_PATH = "/v1/completions"
_PIECE_BYTES = 200  # of a body in transit
_DONE = b"[DONE]"
_CODES = {reason.http_status: reason.grpc_code for reason in reversed(Reason)}
_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}
# A failure within a stream has no status, only a type and a message.
_STATUSES = {"rate_limit_error": 429, "service_unavailable_error": 503, "invalid_request_error": 400}


def make_server(servicer: RequestServicer, link: SchedulerLink) -> HttpServer:
    """Return the HTTP API of a front end, without a port."""
    intake = servicer.intake
    admission = CallAdmission(
        HostNames("127.0.0.1"), Origins((), ""), None, intake, lambda: ("toy",), accepts_any_model_name=False
    )
    with mock.patch.object(socket, "create_server", return_value=socket.socket()):
        routes = Routes(intake, link.forwarder.forward, admission, bytes, is_lenient=False)
        return HttpServer("127.0.0.1", 0, None, admission, routes)


class HttpCall:
    """An HTTP request, as seen by its client and its server."""

    def __init__(self, server: HttpServer, network: Network, body: bytes) -> None:
        self._network = network
        self._rng = Random(network.rng.random())
        self._up, self._down = Pipe(self._rng, network.weather), Pipe(self._rng, network.weather)
        self._has_body = False
        self._is_over = False  # for the client
        self._gone = asyncio.Event()
        network.calls[self] = None  # type: ignore[index]
        for start in range(0, len(body), _PIECE_BYTES):
            self._up.put(body[start : start + _PIECE_BYTES])
        self._up.put(None)
        scope = {
            "type": "http",
            "method": "POST",
            "path": _PATH,
            "raw_path": _PATH.encode(),
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())],
            "state": {},
            "certificate_names": (),
            "abort": self.cut,
        }
        self._serving = asyncio.create_task(server(scope, self._receive, self._send))
        self._serving.add_done_callback(lambda _: self._forget())

    # The client's side

    async def read(self) -> bytes | None:
        """Return the response's next part, or None at the end; the first part is the status. Raises PagewireError."""
        item = await self._down.read()
        if isinstance(item, Status):
            raise decode_failure(pb.StreamFailure(code=StatusCode.UNAVAILABLE.value[0], message=item.details))
        return item

    def close(self) -> None:
        """Stop reading. The server notices later."""
        if not self._is_over:
            self._is_over = True
            self._down.cut()
            self._hang_up(self._network.weather.delay)
            self._forget()

    # The network's side

    def begin(self) -> None:
        """Ignore a new connection: this request does not use it."""

    def cut(self) -> None:
        """Lose the connection. Each side notices the loss separately."""
        self._up.cut()
        self._down.cut()
        if not self._is_over:
            loop = asyncio.get_running_loop()
            lost = Status(StatusCode.UNAVAILABLE, "Socket closed")
            loop.call_later(self._rng.random() * self._network.weather.delay, self._down.end, lost)
        self._hang_up(self._network.weather.notice)

    def _hang_up(self, seconds: float) -> None:
        if not self._serving.done():
            asyncio.get_running_loop().call_later(self._rng.random() * seconds, self._gone.set)

    def _forget(self) -> None:
        if self._is_over and self._serving.done():
            self._network.calls.pop(self, None)  # type: ignore[call-overload]

    # The server's side: ASGI

    async def _receive(self) -> dict[str, Any]:
        if not self._has_body:
            reading = asyncio.ensure_future(self._up.read())
            leaving = asyncio.ensure_future(self._gone.wait())
            try:
                await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                if not reading.done():
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
            if not reading.cancelled():
                piece = reading.result()
                self._has_body = piece is None
                return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        """Return when there is room for the message. Messages to a client that has gone are dropped."""
        if message["type"] == "http.response.start":
            await self._down.send(str(message["status"]).encode())
            return
        if message.get("body"):
            await self._down.send(bytes(message["body"]))
        if not message.get("more_body", False):
            self._down.put(None)


def body_of(request: SimulatedRequest, timeout: float | None, *, is_streamed: bool) -> bytes:
    body: dict[str, Any] = {
        "request_id": request.name,
        "tenant": request.tenant,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "n": request.n,
        "stop_token_ids": request.stop_token_ids,
        "stop": request.stop,
        "min_tokens": request.min_tokens,
        "include_stop_str_in_output": request.includes_stop,
        "ignore_eos": request.ignores_eos,
        "logprobs": 0 if request.has_logprobs else None,
        "prompt_logprobs": 0 if request.has_prompt_logprobs else None,
        "beam_width": request.beam_width,
        "temperature": -1.0 if request.is_invalid else None,
        "timeout": timeout,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": is_streamed,
    }
    if is_streamed:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return json.dumps(body).encode()


async def read_over_http(
    server: HttpServer, network: Network, request: SimulatedRequest, seconds: float | None, *, is_streamed: bool
) -> AsyncGenerator[pb.GenerateResponse]:
    """Yield the responses to a request within `seconds`, converted to gRPC messages. Raises PagewireError."""
    if not network.is_up:
        raise decode_failure(pb.StreamFailure(code=StatusCode.UNAVAILABLE.value[0], message="nobody listens"))
    call = HttpCall(server, network, body_of(request, seconds, is_streamed=is_streamed))
    reader = AnswerReader(request)
    try:
        status = int(await call.read() or b"0")
        is_events = is_streamed and status == 200
        content = b""
        while (piece := await call.read()) is not None:
            content += piece
            while is_events and b"\n\n" in content:
                event, _, content = content.partition(b"\n\n")
                for response in reader.read_event(event):
                    yield response
        if status != 200:
            raise _failure(status, json.loads(content)["error"]["message"])
        if is_events:
            assert reader.is_done, "a stream has no end"
            assert not content, "a part of an event"
        else:
            for response in reader.read_whole(content):
                yield response
    finally:
        call.close()


def _failure(status: int, message: str) -> Exception:
    return decode_failure(pb.StreamFailure(code=_CODES[status], message=message))


class AnswerReader:
    """A reader of the HTTP responses to one request.

    Attributes:
        is_done: the last event of a stream has arrived.
    """

    def __init__(self, request: SimulatedRequest) -> None:
        self._request = request
        self._num_tokens: Counter[int] = Counter()  # by sample
        self._logprobs: Counter[int] = Counter()  # sums, by sample
        self.is_done = False

    def read_whole(self, content: bytes) -> list[pb.GenerateResponse]:
        answer = json.loads(content)
        responses = [self._response(choice, answer["usage"]["prompt_tokens"]) for choice in answer["choices"]]
        self._check_usage(answer["usage"])
        return responses

    def read_event(self, event: bytes) -> list[pb.GenerateResponse]:
        """Return the responses in an event; an empty list for a comment or the last event. Raises PagewireError."""
        assert not self.is_done, "something comes behind the end of a stream"
        if event.startswith(b":"):
            return []
        content = event.removeprefix(b"data: ")
        assert len(content) < len(event), "this is no event"
        if content == _DONE:
            self.is_done = True
            return []
        answer = json.loads(content)
        if "error" in answer:
            raise self._failure(answer["error"])
        if not answer["choices"]:
            self._check_usage(answer["usage"])
            return []
        (choice,) = answer["choices"]
        response = self._response(choice, answer["usage"]["prompt_tokens"])
        assert answer["usage"]["completion_tokens"] == self._num_tokens[choice["index"]], "other tokens are counted"
        return [response]

    def _failure(self, error: dict[str, Any]) -> Exception:
        status = _STATUSES.get(error["type"], 504 if "timeout" in error["message"] else 500)
        return _failure(499 if status == 400 and "aborted" in error["message"] else status, error["message"])

    def _check_usage(self, usage: dict[str, Any]) -> None:
        assert usage["completion_tokens"] == self._num_tokens.total(), "other tokens are counted"
        assert usage["prompt_tokens"] == len(self._request.prompt_ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    def _response(self, choice: dict[str, Any], num_prompt_tokens: int) -> pb.GenerateResponse:
        index, token_ids = choice["index"], choice["token_ids"] or []
        response = pb.GenerateResponse(
            request_id=self._request.name,
            index=index,
            first_token=self._num_tokens[index],
            token_ids=token_ids,
            text=choice["text"],
        )
        self._num_tokens[index] += len(token_ids)
        self._put_logprobs(response, choice)
        if (reason := choice["finish_reason"]) is not None:
            response.finish_reason = _FINISH_REASONS[reason]
            response.usage.prompt_tokens = num_prompt_tokens
            response.usage.completion_tokens = self._num_tokens[index]
            stop = choice["stop_reason"]
            if isinstance(stop, str):
                response.stop_text = stop
            elif reason == "stop":
                response.stop_token_id = EOS if stop is None else stop  # HTTP does not report the model's own end token
        return response

    def _put_logprobs(self, response: pb.GenerateResponse, choice: dict[str, Any]) -> None:
        index = response.index
        if (columns := choice["logprobs"]) is not None:
            for token, logprob in zip(columns["tokens"], columns["token_logprobs"], strict=True):
                response.logprobs.add(token_id=int(token.removeprefix("token_id:")), logprob=logprob)
                self._logprobs[index] += logprob
            assert [entry.token_id for entry in response.logprobs] == list(response.token_ids)
            response.cumulative_logprob = self._logprobs[index]
        elif (logprob := self._request.outputs[index].cumulative_logprob) is not None:
            response.cumulative_logprob = logprob  # HTTP does not report it
        for entry in (choice.get("prompt_logprobs") or [None])[1:] if index == 0 else ():  # all samples have them
            ((token_id, told),) = entry.items()
            response.prompt_logprobs.add(token_id=int(token_id), logprob=told["logprob"])
