"""Measures the effect on a router's clients when one of two scheduler-worker pairs loses its worker.

    python -m bench worker-loss

Two pairs of the bundled model run with `--worker-grace 5`, and smg in front of them is configured as in
`deploy/components/router`. Clients send short requests, whole and streamed, one after the other. Then some long streams
begin too, and the worker of the pair that runs most of them is killed. The streams of this pair cannot move: they wait
until the worker is restarted, which is long after the grace period.

No other client should wait much longer than the grace period, and no request may fail. A wait is the time to the first
piece of a stream, or to a complete answer. The text of each long stream is compared with the text of the same request
before the loss. The raw numbers are written to bench/results/worker_loss.json.
"""

import argparse
import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.goals import verdict
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.router import Router
from testing.services import System

MODEL = Path("models/storyteller")
GRACE = 5.0
POLICIES = ("cache_aware", "round_robin")
NUM_CLIENTS = 16
CALM_SECONDS, AWAY_SECONDS = 2.0, 14.0  # before the long streams begin, and until the worker is restarted
GOAL_SECONDS = 6.0
WORKER_FLAGS = ("--dtype", "float32", "--num-threads", 1, "--num-device-blocks", 4096)
# As in deploy/components/router, otherwise smg's defaults. testing.router uses shorter intervals.
ROUTER_FLAGS = (
    "--worker-startup-check-interval=2",
    "--health-check-interval-secs=5",
    "--health-success-threshold=2",
    "--cb-timeout-duration-secs=60",
)
# Prompts of the long streams.
PROMPTS = ("Once there was", "One day", "The little fox", "A bear", "In the forest", "At night", "The owl", "Far away")


@dataclass
class Answer:
    """The answer to one request. Times are in seconds, finally relative to the time when the worker was killed."""

    kind: str
    sent_at: float
    begun_at: float = 0.0  # arrival of the first piece of a stream, or of the whole answer
    ended_at: float = 0.0
    status: int = 0
    is_complete: bool = False

    @property
    def wait(self) -> float:
        return self.begun_at - self.sent_at

    def set_origin(self, origin: float) -> None:
        """Make all times relative to `origin`."""
        self.sent_at, self.begun_at = self.sent_at - origin, self.begun_at - origin
        self.ended_at -= origin


class Clients:
    """The clients of one router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._numbers = itertools.count()
        self.answers: list[Answer] = []

    def hold_long_stream(self, prompt: str, has_begun: threading.Event) -> str:
        """Stream a long answer, and return its text."""
        return self._stream("long", has_begun, prompt=prompt, max_tokens=1900, ignore_eos=True, seed=1)

    def ask(self, until: threading.Event) -> None:
        """Send one short request after the other, until the event is set."""
        while not until.is_set():
            number = next(self._numbers)
            body = {"prompt": f"{number} {PROMPTS[number % len(PROMPTS)]}", "seed": number, "max_tokens": 24}
            if number % 2:
                self._stream("streamed", threading.Event(), **body)
            else:
                self._whole(**body)

    def _whole(self, **body: Any) -> None:
        answer = Answer("whole", time.perf_counter())
        reply = self._router.post("/v1/completions", model=MODEL.name, **body)
        answer.status, answer.is_complete = reply.status, reply.status == 200
        answer.begun_at = answer.ended_at = time.perf_counter()
        self.answers.append(answer)

    def _stream(self, kind: str, has_begun: threading.Event, **body: Any) -> str:
        answer, text = Answer(kind, time.perf_counter()), ""
        stream = self._router.stream("/v1/completions", model=MODEL.name, **body)
        is_finished = False
        for event in stream:
            if not has_begun.is_set():
                answer.begun_at = time.perf_counter()
                has_begun.set()
            for choice in event.get("choices", ()):
                text += choice["text"]
                is_finished = is_finished or choice["finish_reason"] is not None
        answer.status, answer.is_complete = stream.status, stream.is_done and is_finished
        answer.ended_at = time.perf_counter()
        if not has_begun.is_set():  # the stream failed
            answer.begun_at = answer.ended_at
            has_begun.set()
        stream.close()
        self.answers.append(answer)
        return text


@contextlib.contextmanager
def pairs() -> Iterator[list[System]]:
    systems: list[System] = []
    scheduler = ("--worker-grace", GRACE, "--worker-timeout", 600)
    try:
        for _ in range(2):
            systems.append(System(MODEL, worker=WORKER_FLAGS, scheduler=scheduler))
        yield systems
    finally:
        for system in systems:
            system.stop()


def num_running(system: System) -> int:
    with grpc.insecure_channel(system.url) as channel:
        loads = scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoads(scheduler_pb2.GetLoadsRequest())
        return loads.num_running


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"grace": GRACE} | {policy: measure_policy(policy) for policy in POLICIES}


def measure_policy(policy: str) -> dict[str, Any]:
    with pairs() as systems:
        urls = [system.url for system in systems]
        with Router(urls, f"--policy={policy}", *ROUTER_FLAGS) as router:
            return lose_a_worker(Clients(router), systems)


def lose_a_worker(clients: Clients, systems: list[System]) -> dict[str, Any]:
    with ThreadPoolExecutor(len(PROMPTS) + NUM_CLIENTS) as pool:

        def hold_long_streams() -> Iterator[str]:
            """Start the long streams. Return an iterator over their texts after all have begun."""
            begun = [threading.Event() for _ in PROMPTS]
            texts = pool.map(clients.hold_long_stream, PROMPTS, begun)
            for event in begun:
                event.wait()
            return texts

        calm = list(hold_long_streams())
        clients.answers.clear()
        done = threading.Event()
        asking = [pool.submit(clients.ask, done) for _ in range(NUM_CLIENTS)]
        time.sleep(CALM_SECONDS)
        disturbed = hold_long_streams()
        victim = max(systems, key=num_running)
        victim.worker.kill()
        killed_at = time.perf_counter()
        time.sleep(AWAY_SECONDS)
        back_after = time.perf_counter() - killed_at
        victim.restart_worker()
        victim.worker.wait_until_ready()
        done.set()
        num_equal = sum(one == other for one, other in zip(calm, disturbed, strict=True))
        for each in asking:
            each.result()
    for answer in clients.answers:
        answer.set_origin(killed_at)
    return {
        "worker_started_again_after": back_after,
        "long_streams_with_the_text_of_a_calm_run": num_equal,
        **summary(clients.answers, back_after),
        "answers_over_a_second": [asdict(answer) for answer in clients.answers if answer.ended_at - answer.sent_at > 1],
    }


def summary(answers: list[Answer], back_after: float) -> dict[str, Any]:
    return {
        "requests": len(answers),
        "requests_that_failed": sum(not answer.is_complete for answer in answers),
        "streams_that_waited_for_the_worker": sum(
            answer.begun_at < 0 < back_after < answer.ended_at for answer in answers
        ),
        "waits_over_a_second": sum(answer.wait > 1 for answer in answers),
        "longest_wait": max(answer.wait for answer in answers),
        "median_wait": statistics.median(answer.wait for answer in answers),
        "longest_wait_before": max(answer.wait for answer in answers if answer.begun_at < 0),
        "longest_wait_after_the_grace": max(answer.wait for answer in answers if answer.sent_at > GRACE + 1),
    }


def report(figures: dict[str, Any]) -> None:
    for policy in POLICIES:
        found = figures[policy]
        longest, num_failed = found["longest_wait"], found["requests_that_failed"]
        print(
            f"{policy}: of {found['requests']} requests {found['waits_over_a_second']} waited for more than 1 s, ",
            end="",
        )
        print(
            f"the longest for {longest:.2f} s {verdict(longest, GOAL_SECONDS, at_least=False)}; before the worker ",
            end="",
        )
        print(f"was killed {found['longest_wait_before']:.2f} s, ", end="")
        print(f"for requests sent a second after the grace {found['longest_wait_after_the_grace']:.2f} s")
        print(f"  {num_failed} failed {verdict(num_failed, 0, at_least=False)}; ", end="")
        num_equal = found["long_streams_with_the_text_of_a_calm_run"]
        print(f"{found['streams_that_waited_for_the_worker']} streams waited for the worker; ", end="")
        print(f"{num_equal} of {len(PROMPTS)} long streams have the same text as in a calm run")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Do nothing: this benchmark has no flags."""
