"""A server with the OpenAI API on loopback that streams words, as many as are asked for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OpenAIStub:
    """Notes the requests. `fails` is told instead of an answer; `ways` change how it answers."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.request_ids: list[str | None] = []
        self.models = ["first", "second"]
        self.words_per_event = 1
        self.tells_usage = True
        self.breaks_off = False
        self.streams = True
        self.fails: tuple[int, Any] | None = None
        self.event_error = False


@contextmanager
def serving(stub: OpenAIStub) -> Iterator[str]:
    """Its address while it runs."""

    class Handler(_Handler):
        pass

    Handler.stub = stub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    # A shutdown waits until it looks next, half a second by default.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    stub: OpenAIStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.endswith("/v1/models"):
            self._send(200, {"data": [{"id": name} for name in self.stub.models]})
        else:
            self._send(404, {"detail": "not here"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.stub.requests.append(body)
        self.stub.authorizations.append(self.headers.get("Authorization"))
        self.stub.request_ids.append(self.headers.get("X-Request-Id"))
        if self.stub.fails is not None:
            return self._send(*self.stub.fails)
        if not self.stub.streams:
            return self._send(200, {"choices": [{"text": "whole"}]})
        is_chat = self.path.endswith("/chat/completions")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in self._events(body, is_chat):
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            middle = len(data) // 2  # what is cut in the middle of an event is one event all the same
            for part in (data[:middle], data[middle:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
        if self.stub.breaks_off:
            self.close_connection = True
            return None
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _events(self, body: dict[str, Any], is_chat: bool) -> Iterator[Any]:
        num_words = body["max_tokens"]
        if is_chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        for start in range(0, num_words, self.stub.words_per_event):
            if self.stub.event_error and start:
                yield {"error": {"message": "out of blocks"}}
                return
            text = " w" * min(self.stub.words_per_event, num_words - start)
            yield {"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]}
            if self.stub.breaks_off:
                return
        yield {"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]}
        if self.stub.tells_usage:
            prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
            yield {"choices": [], "usage": {"prompt_tokens": len(prompt.split()), "completion_tokens": num_words}}
        yield "[DONE]"

    def _send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
