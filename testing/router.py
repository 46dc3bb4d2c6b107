"""smg, a router for several schedulers, as a process, and an HTTP client for it."""

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pagewire.hosting.supervisor import free_port
from testing.services import ENVIRON, HOST


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any

    @property
    def text(self) -> str:
        """The text of the first choice of a completion or a chat completion."""
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def num_cached_tokens(self) -> int:
        return self.body["usage"]["prompt_tokens_details"]["cached_tokens"]


class Router:
    """A router that is ready inside its `with` block.

    It does no warm-up and checks health often, so that its routing is repeatable.
    """

    def __init__(self, schedulers: Sequence[str], *flags: str, key: str = "") -> None:
        """`schedulers` are HOST:PORT. `key` is the administration key, if the router requires one."""
        self.port = free_port(HOST)
        self._num_schedulers = len(schedulers)
        self._key = key
        command = [sys.executable, "-m", "smg.launch_router", f"--port={self.port}", "--host=127.0.0.1"]
        command += ["--log-level=error", "--prometheus-host=127.0.0.1", f"--prometheus-port={free_port(HOST)}"]
        if schedulers:
            command += ["--worker-urls", *(f"grpc://{scheduler}" for scheduler in schedulers)]
        command += [
            "--worker-startup-check-interval=1",
            "--health-check-interval-secs=1",
            "--health-success-threshold=1",
        ]
        command += ["--worker-warmup-secs=0", "--worker-warmup-share=0", "--worker-warmup-divert-every=0"]
        command += ["--cb-timeout-duration-secs=1", "--shutdown-grace-period-secs=1", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRON)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.stop)
            self.wait_until_ready()
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        wait_until(lambda: self._answers("/liveness"), 60)
        if self._num_schedulers:
            wait_until(self._has_tokenizer, 60)
            self.wait_for_schedulers(self._num_schedulers)

    def wait_for_schedulers(self, count: int) -> None:
        """Wait until the router sends requests to exactly `count` schedulers."""

        def num_ready() -> int:
            workers = self.get("/workers").body["workers"]
            return sum(worker["status"] == "ready" and worker["is_healthy"] for worker in workers)

        wait_until(lambda: num_ready() == count)

    def _answers(self, path: str) -> bool:
        assert self._process.poll() is None, f"the router ended with {self._process.returncode}"
        try:
            return self.get(path).status == 200
        except OSError:
            return False

    def _has_tokenizer(self) -> bool:
        """Return whether the tokenizer, which is loaded last, can be used."""
        models = self.get("/v1/models").body["data"] if self._answers("/readiness") else []
        return bool(models) and self.post("/v1/tokenize", model=models[0]["id"], prompt="a").status == 200

    def get(self, path: str) -> Answer:
        return ask(self.port, "GET", path, None, self._key)

    def post(self, path: str, **body: Any) -> Answer:
        return post(self.port, path, body)

    def stream(self, path: str, **body: Any) -> "Stream":
        return Stream(self.port, path, body | {"stream": True})

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()


class Stream:
    """A stream of server-sent events. Iteration ends at the event `[DONE]`."""

    def __init__(self, port: int, path: str, body: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        send(self._connection, "POST", path, body)
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.is_done = False

    def __iter__(self) -> Iterator[Any]:
        while line := self._response.readline():
            text = line.decode().strip()
            if text == "data: [DONE]":
                self.is_done = True
                return
            if text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def post(port: int, path: str, body: Any) -> Answer:
    return ask(port, "POST", path, body)


def ask(port: int, method: str, path: str, body: Any, key: str = "") -> Answer:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        send(connection, method, path, body, key)
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return Answer(response.status, json.loads(text) if is_json else text.decode() or None)


def send(connection: http.client.HTTPConnection, method: str, path: str, body: Any, key: str = "") -> None:
    data = None if body is None else json.dumps(body)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connection.request(method, path, data, headers)


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Poll until `holds` returns true, for a change that no event reports."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
