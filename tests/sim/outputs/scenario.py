"""The scenario of a seed: a server, perhaps a front end, their networks, requests, readers and faults."""

from dataclasses import dataclass, replace
from enum import Enum
from random import Random

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.scheduler_options import SchedulerOptions
from tests.sim.outputs.network import Weather
from tests.sim.outputs.request import SimulatedRequest
from tests.sim.scenario import BAD_TOKEN, VOCAB_SIZE

MAX_MODEL_LEN = 64


class Way(Enum):
    """How a client reads a request."""

    SHARED = "on a call that the library shares"
    ALONE = "on a call of its own"
    DETACHED = "when it likes"
    HTTP_WHOLE = "over HTTP, whole"
    HTTP_STREAMED = "over HTTP, as events"


@dataclass(frozen=True, slots=True)
class Task:
    """A client's request and the client's behaviour. Times are in seconds."""

    request: SimulatedRequest
    way: Way
    by_front_end: bool
    time: float
    timeout: float | None
    read_seconds: float  # the longest time between two reads
    gives_up_after: float | None
    aborted_after: float | None  # by the Abort RPC
    attachments: tuple[float, ...]  # when further readers of a detached request attach


@dataclass(frozen=True, slots=True)
class SlowCall:
    """A client that writes its own messages, and reads no response before a given time."""

    requests: tuple[SimulatedRequest, ...]
    by_front_end: bool
    time: float
    reads_from: float
    token_only: bool
    tells_kept: bool
    num_invalid: int
    gives_up_after: float | None
    closes_early: bool  # the client half-closes as soon as it has written all messages


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    capacity: WorkerCapacity
    options: SchedulerOptions
    begins_at: float  # when the first worker joins
    step_seconds: float
    worker_grace: float
    max_requests: int | None  # the limit of one tenant's concurrent requests
    retention: float  # seconds for which a detached result is kept
    max_ended: int
    max_bytes: int
    client_weather: Weather
    link_weather: Weather
    max_message_weight: int
    max_unread_failures: int
    max_shared_bytes: int
    cuts: tuple[tuple[float, int, float], ...]  # time, index of the network, and duration
    losses: tuple[tuple[float, float], ...]  # time and duration of the worker's losses
    bad_rows: tuple[float, ...]  # times at which a row of the worker gets invalid logits
    stops_at: float | None
    tasks: tuple[Task, ...]
    http_tasks: tuple[Task, ...]
    slow_calls: tuple[SlowCall, ...]


def draw_scenario(seed: int) -> Scenario:
    rng = Random(f"outputs {seed}")
    has_front_end = rng.random() < 0.6
    has_faults = rng.random() < 0.6
    capacity = _draw_capacity(rng)
    tasks = tuple(_draw_task(rng, number, has_front_end) for number in range(rng.randint(3, 9)))
    slow_calls = tuple(_draw_slow_call(rng, number, has_front_end) for number in range(rng.choice((0, 0, 1, 1, 2))))
    max_num_seqs = rng.randint(1, 6)
    return Scenario(
        seed=seed,
        capacity=capacity,
        options=SchedulerOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice((max_num_seqs, 16, 64)),
            max_waiting_requests=rng.choice((2, 100, 100, 100)),
            max_model_len=MAX_MODEL_LEN,
        ),
        begins_at=rng.random() * rng.choice((0.2, 0.2, 2.0)),
        step_seconds=rng.choice((0.01, 0.01, 0.01, 3.0)),
        worker_grace=rng.choice((0.1, 60.0, 60.0)),
        max_requests=rng.choice((2, None, None, None)),
        retention=rng.choice((1.0, 30.0, 300.0)),
        max_ended=rng.choice((1, 2, 4, 100, 100)),
        max_bytes=rng.choice((9_000, 1 << 20, 1 << 20)),
        client_weather=_draw_weather(rng),
        link_weather=_draw_weather(rng),
        max_message_weight=rng.choice((1, 4, 65_536)),
        max_unread_failures=rng.choice((1, 3, 1024)),
        max_shared_bytes=rng.choice((60, 1 << 20)),
        cuts=tuple(
            (rng.random() * 2, rng.randrange(3), rng.choice((0.05, 1.0, 5.0)))
            for _ in range(rng.randint(1, 4) if has_faults and rng.random() < 0.7 else 0)
        ),
        losses=tuple(
            (rng.random() * 2, rng.choice((0.05, 0.5, 5.0)))
            for _ in range(rng.randint(1, 3) if has_faults and rng.random() < 0.7 else 0)
        ),
        bad_rows=tuple(rng.random() * 2 for _ in range(rng.choice((0, 0, 3)))),
        stops_at=rng.random() * 2 if rng.random() < 0.15 else None,
        tasks=tasks,
        http_tasks=_draw_http_tasks(seed) if has_front_end else (),
        slow_calls=slow_calls,
    )


def _draw_weather(rng: Random) -> Weather:
    return Weather(
        delay=rng.choice((0.0, 0.005, 0.03, 0.3)),
        window=rng.choice((1, 2, 8, 64)),
        notice=rng.choice((0.01, 2.0)),
    )


def _draw_capacity(rng: Random) -> WorkerCapacity:
    return WorkerCapacity(
        worker_id="w",
        model_digest=b"m",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        num_device_blocks=rng.choice((16, 30, 60)),
        block_bytes=1000,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        device="cpu",
        dtype="float32",
        attention_backend="none",
        grammar_version="g",
        num_host_blocks=rng.choice((0, 12)),
        swap_bandwidth=1e8,
    )


def _draw_task(rng: Random, number: int, has_front_end: bool) -> Task:
    way = rng.choice((Way.SHARED, Way.SHARED, Way.ALONE, Way.DETACHED, Way.DETACHED))
    request = draw_request(rng, f"r{number}")
    return Task(
        request=request,
        way=way,
        by_front_end=has_front_end and way is not Way.DETACHED and rng.random() < 0.8,
        time=rng.random() * 1.5,
        timeout=rng.choice((0.0, 0.1, 0.3)) if way is not Way.DETACHED and rng.random() < 0.15 else None,
        read_seconds=rng.choice((0.0, 0.0, 0.02, 0.5)),
        gives_up_after=rng.random() * 0.5 if rng.random() < 0.25 else None,
        aborted_after=rng.random() * 0.5 if rng.random() < 0.15 else None,
        attachments=tuple(rng.random() * 1.0 for _ in range(rng.randint(0, 2))),
    )


def _draw_http_tasks(seed: int) -> tuple[Task, ...]:
    """Return some requests over HTTP, for one seed in three.

    They are drawn from a random stream of their own, so that seeds that once found a bug draw everything else as
    before.
    """
    rng = Random(f"http {seed}")
    num_tasks = rng.randint(1, 4) if rng.random() < 1 / 3 else 0
    return tuple(_draw_http_task(rng, number) for number in range(num_tasks))


def _draw_http_task(rng: Random, number: int) -> Task:
    return Task(
        request=draw_request(rng, f"h{number}"),
        way=rng.choice((Way.HTTP_WHOLE, Way.HTTP_STREAMED)),
        by_front_end=True,
        time=rng.random() * 1.5,
        timeout=rng.choice((0.01, 0.1, 0.3)) if rng.random() < 0.15 else None,
        read_seconds=rng.choice((0.0, 0.0, 0.02, 0.5)),
        gives_up_after=rng.random() * 0.5 if rng.random() < 0.25 else None,
        aborted_after=rng.random() * 0.5 if rng.random() < 0.15 else None,
        attachments=(),
    )


def _draw_slow_call(rng: Random, number: int, has_front_end: bool) -> SlowCall:
    token_only = rng.random() < 0.6
    requests = tuple(draw_request(rng, f"s{number}.{place}") for place in range(rng.randint(1, 5)))
    if token_only:
        requests = tuple(
            replace(request, prompt=request.prompt_ids, stop=(), includes_stop=False) for request in requests
        )
    # A random stream of its own: seeds that once found a bug draw everything else as before.
    impatience = Random(f"impatience {requests[0].seed}")
    return SlowCall(
        requests=requests,
        by_front_end=has_front_end and rng.random() < 0.3,
        time=rng.random() * 1.5,
        reads_from=rng.choice((0.0, 0.5, 40.0)),
        token_only=token_only,
        tells_kept=token_only and rng.random() < 0.5,
        num_invalid=rng.choice((0, 0, 12)),
        gives_up_after=impatience.random() * 0.5 if impatience.random() < 0.25 else None,
        closes_early=rng.random() < 0.5,
    )


def draw_request(rng: Random, name: str) -> SimulatedRequest:
    prompt: tuple[int, ...] | str = tuple(rng.randrange(BAD_TOKEN) for _ in range(rng.randint(1, 14)))
    kind = rng.random()
    if kind < 0.15:
        prompt = "".join(rng.choice("abcxyz") for _ in range(rng.randint(1, 14)))
    elif kind < 0.2 and isinstance(prompt, tuple):
        prompt = (*prompt, BAD_TOKEN)
    request = SimulatedRequest(
        name=name,
        tenant=rng.choice(("", "a", "b")),
        prompt=prompt,
        max_tokens=rng.choice((1, rng.randint(1, 20), rng.randint(1, 20))),
        seed=rng.randrange(1 << 32),
        n=rng.choice((1, 1, 1, 2, 3)),
        ignores_eos=rng.random() < 0.5,
        includes_stop=rng.random() < 0.3,
        is_invalid=rng.random() < 0.05,
    )
    if rng.random() < 0.4:
        stops = tuple(sorted(rng.sample(range(BAD_TOKEN), rng.choice((1, 10)))))
        request = replace(request, stop_token_ids=stops, min_tokens=min(request.max_tokens, rng.choice((0, 3))))
    if rng.random() < 0.1:
        return replace(request, beam_width=rng.randint(request.n, 3))
    if rng.random() < 0.3:
        texts = tuple(str(rng.randrange(10 ** rng.randint(1, 3))) for _ in range(rng.randint(1, 2)))
        request = replace(request, stop=texts, min_tokens=0)
    if rng.random() < 0.25:
        request = replace(request, has_logprobs=True, has_prompt_logprobs=rng.random() < 0.5)
    return request
