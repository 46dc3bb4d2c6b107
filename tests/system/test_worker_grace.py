"""Two pairs behind the real gateway, and one loses its worker: the other serves all that has not begun there."""

import re
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.hosting.supervisor import free_port
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.forked import ForkedProcess
from testing.gateway import Gateway
from testing.services import HOST, System

MODEL = Path("models/storyteller")
PROMPTS = ("Once there was", "One day", "The little fox", "A bear", "In the forest", "The owl")
GRACE = 1
LONG, SHORT = 1000, 8  # tokens


@dataclass
class Pair:
    metrics_port: int = field(default_factory=lambda: free_port(HOST))

    def __post_init__(self) -> None:
        flags = ["--worker-grace", GRACE, "--worker-timeout", 600, "--metrics-port", self.metrics_port]
        worker = ["--dtype", "float32", "--num-threads", 1, "--num-device-blocks", 2048]
        self.system = System(MODEL, worker=worker, scheduler=flags, start=ForkedProcess)

    def loads(self) -> scheduler_pb2.GetLoadsResponse:
        with grpc.insecure_channel(self.system.url) as channel:
            return scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoads(scheduler_pb2.GetLoadsRequest())

    def num_sent_away(self) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics") as response:
            text = response.read().decode()
        (count,) = re.findall(r'vllm:request_success_total\{[^}]*finished_reason="error"[^}]*\} (\S+)', text)
        return float(count)


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    try:
        made += [Pair() for _ in range(2)]
        yield made
    finally:
        for pair in made:
            pair.system.stop()


@pytest.fixture
def gateway(pairs: list[Pair]) -> Iterator[Gateway]:
    with Gateway([pair.system.url for pair in pairs], "--policy=round_robin") as gateway:
        yield gateway


def read(gateway: Gateway, prompt: str, max_tokens: int, has_begun: threading.Event | None = None) -> str:
    """The text of a stream that must come to its end."""
    stream, text = gateway.stream("/v1/completions", model=MODEL.name, **body_of(prompt, max_tokens)), ""
    assert stream.status == 200
    for event in stream:
        assert "error" not in event, event
        if has_begun is not None:
            has_begun.set()
        text += "".join(choice["text"] for choice in event["choices"])
    assert stream.is_done
    stream.close()
    return text


def ask(gateway: Gateway, prompt: str, max_tokens: int) -> str:
    answer = gateway.post("/v1/completions", model=MODEL.name, **body_of(prompt, max_tokens))
    assert answer.status == 200, answer
    return answer.text


def body_of(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True}


def test_only_streams_that_have_begun_wait_for_the_worker(pairs: list[Pair], gateway: Gateway) -> None:
    with ThreadPoolExecutor(64) as pool:
        calm = list(pool.map(lambda prompt: ask(gateway, prompt, LONG), PROMPTS))
        # The client of a whole output has nothing of it yet, however much there is.
        wholes = [pool.submit(ask, gateway, prompt, LONG) for prompt in PROMPTS]
        begun = [threading.Event() for _ in PROMPTS]
        streams = [
            pool.submit(read, gateway, prompt, LONG, event) for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        for event in begun:
            assert event.wait(60)
        victim = max(pairs, key=lambda pair: pair.loads().num_running)
        victim.system.worker.kill()
        shorts = [pool.submit(each, gateway, prompt, SHORT) for prompt in PROMPTS for each in (ask, read)]
        assert [each.result(60) for each in wholes] == calm
        assert all(each.result(60) for each in shorts)
        assert victim.loads().num_waiting > 0, "the streams"
        assert victim.num_sent_away() > 0
        victim.system.restart_worker()
        assert [stream.result(60) for stream in streams] == calm
        victim.system.worker.wait_until_ready()
        gateway.wait_for_replicas(2)
