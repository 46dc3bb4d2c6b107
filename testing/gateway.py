"""The gateway as a process in front of some replicas, and an HTTP client for it."""

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
        """Of the first choice of a completion or a chat completion."""
        choice = self.body["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    @property
    def num_cached_tokens(self) -> int:
        return self.body["usage"]["prompt_tokens_details"]["cached_tokens"]


class Gateway:
    """Ready in its block, or when `wait_until_ready` returns. Its switches make routing repeatable: no warm-up, quick
    health checks.
    """

    def __init__(self, replicas: Sequence[str], *flags: str) -> None:
        """`replicas` are HOST:PORT."""
        self.port = free_port(HOST)
        self._num_replicas = len(replicas)
        command = [sys.executable, "-m", "pagewire.hosting.gateway_process", f"http://127.0.0.1:{self.port}"]
        command += [f"--port={self.port}", "--host=127.0.0.1", "--log-level=error"]
        command += ["--prometheus-host=127.0.0.1", "--prometheus-port=0"]
        command += ["--worker-urls", *(f"grpc://{replica}" for replica in replicas)]
        command += [
            "--worker-startup-check-interval=1",
            "--health-check-interval-secs=1",
            "--health-success-threshold=1",
        ]
        command += ["--worker-warmup-secs=0", "--worker-warmup-share=0", "--worker-warmup-divert-every=0"]
        command += ["--cb-timeout-duration-secs=1", "--shutdown-grace-period-secs=1", *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON)
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
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready on "):
                break
        else:
            raise AssertionError(f"the gateway ended with {self._process.wait()}")
        self.wait_for_replicas(self._num_replicas)

    def wait_for_replicas(self, count: int) -> None:
        """Until it sends requests to so many."""

        def num_ready() -> int:
            workers = self.get("/workers").body["workers"]
            return sum(worker["status"] == "ready" and worker["is_healthy"] for worker in workers)

        wait_until(lambda: num_ready() == count)

    def get(self, path: str) -> Answer:
        return ask(self.port, "GET", path, None)

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
            assert self._process.stdout is not None
            self._process.stdout.close()


class Stream:
    """Server-sent events. Iterating ends with the event `[DONE]`."""

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


def ask(port: int, method: str, path: str, body: Any) -> Answer:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        send(connection, method, path, body)
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return Answer(response.status, json.loads(text) if is_json else text.decode() or None)


def send(connection: http.client.HTTPConnection, method: str, path: str, body: Any) -> None:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"})


def wait_until(holds: Callable[[], bool], seconds: float = 20) -> None:
    """For what no event tells of."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
