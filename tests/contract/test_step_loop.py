"""The step loop without gRPC: the link is in this process, and streams are plain lists."""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from pagewire.common.wire.messages import (
    RowOpening,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerStarting,
)
from scheduler_service.core import explain
from scheduler_service.core.request import EndReason, Request, SequenceEnd, TokenLogprobs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.metrics import Metrics
from scheduler_service.serving.active_request import ActiveRequest, Publisher
from scheduler_service.serving.availability import WorkerAvailability
from scheduler_service.serving.checkpoint.tokenizer import DecodedText
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.observer import Observers
from scheduler_service.serving.output import OutputReader, SampleRecord
from scheduler_service.serving.step_loop import StepLoop
from testing.core.simulated_worker import SimulatedWorker, reference
from tests.contract.hand_clock import ManualClock

VOCAB_SIZE = 100
CAPACITY = WorkerCapacity(
    worker_id="here",
    model_digest=b"",
    vocab_size=VOCAB_SIZE,
    max_model_len=200,
    block_size=4,
    num_device_blocks=100,
    block_bytes=1,
    max_num_seqs=8,
    max_num_batched_tokens=32,
    device="cpu",
    dtype="float32",
    attention_backend="simulated",
)


class LocalLink:
    """A link that executes each plan one iteration of the event loop later, with at most two waiting plans."""

    def __init__(self, loop: StepLoop, worker: SimulatedWorker | None = None) -> None:
        self._loop = loop
        self._worker = worker or SimulatedWorker(100, 4, VOCAB_SIZE, 8, 32)
        self.num_waiting = 0
        self.max_waiting = 0
        self.closed = ""

    def send(self, plan: StepPlan) -> None:
        self.num_waiting += 1
        self.max_waiting = max(self.max_waiting, self.num_waiting)
        asyncio.get_running_loop().call_soon(self._execute, plan)

    def close(self, reason: str) -> None:
        self.closed = reason

    def _execute(self, plan: StepPlan) -> None:
        self.num_waiting -= 1
        if not self.closed:
            self._loop.exchange.result(self._worker.execute(plan))


def make_scheduler(**options: object) -> Scheduler:
    return Scheduler(SchedulerOptions(8, 32, 200, **options))


@asynccontextmanager
async def running_loop(
    scheduler: Scheduler | None = None, metrics: Metrics | None = None, **options: float
) -> AsyncIterator[StepLoop]:
    loop = StepLoop(scheduler or make_scheduler(), [metrics or Metrics()], **({"worker_timeout": 60.0} | options))
    task = asyncio.create_task(loop.run())
    yield loop
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Reader:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.end: SequenceEnd | None = None
        self.ended = asyncio.Event()
        self._output = SampleRecord(0)
        self._reader = OutputReader(self._output)

    def submit(self, loop: StepLoop, request: Request) -> None:
        active = ActiveRequest(request, [self._output], loop)
        active.listeners[self._read] = None
        loop.submit(active)

    def _read(self) -> None:
        assert self.end is None
        for delta in self._reader.take():
            assert delta.first_token == len(self.token_ids)
            self.token_ids.extend(delta.token_ids)
            self.end = delta.end
        self.end = self.end or self._output.failure
        if self.end is not None:
            self.ended.set()


def make_request(name: int, num_tokens: int = 20) -> Request:
    return Request(str(name), "", (name % VOCAB_SIZE, 1, 2, 3, 4), SamplingParams(), num_tokens)


async def test_plans_flow_two_at_a_time_and_tokens_come_out() -> None:
    async with running_loop() as loop:
        link = LocalLink(loop)
        loop.exchange.worker_ready(CAPACITY, 1, link)
        readers = [Reader() for _ in range(20)]
        for name, reader in enumerate(readers):
            reader.submit(loop, make_request(name))
        for name, reader in enumerate(readers):
            await asyncio.wait_for(reader.ended.wait(), 5)
            prompt = make_request(name).prompt_token_ids
            assert reader.token_ids == reference(prompt, 20, seed=0, sample_index=0, vocab_size=VOCAB_SIZE)
        assert link.max_waiting == 2
        assert explain.stats(loop.state).num_held_blocks == 0


async def test_a_result_that_does_not_fit_ends_the_epoch() -> None:
    async with running_loop() as loop:
        link = LocalLink(loop)
        loop.exchange.worker_ready(CAPACITY, 1, link)
        reader = Reader()
        reader.submit(loop, make_request(1))
        await asyncio.sleep(0)
        loop.exchange.result(replace(SimulatedWorker(100, 4, VOCAB_SIZE, 8, 32).execute(_one_step()), epoch=1, step=77))
        while not link.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "77" in link.closed
        assert not loop.exchange.is_connected
        loop.exchange.worker_ready(CAPACITY, 2, LocalLink(loop))
        await asyncio.wait_for(reader.ended.wait(), 5)
        assert loop.availability.num_worker_losses == 1


async def test_late_messages_of_a_closed_link_are_ignored() -> None:
    """The session of an ended epoch may read one more message before it is cancelled."""
    async with running_loop() as loop:
        link = LocalLink(loop)
        loop.exchange.worker_ready(CAPACITY, 1, link)
        loop.exchange.moved(77)
        while not link.closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "77" in link.closed, "no plan has this number"
        assert not loop.exchange.is_connected
        loop.exchange.result(SimulatedWorker(100, 4, VOCAB_SIZE, 8, 32).execute(_one_step()))
        loop.exchange.moved(78)
        loop.exchange.grammar_ready(1, "")
        link = LocalLink(loop)
        loop.exchange.worker_ready(CAPACITY, 2, link)
        reader = Reader()
        reader.submit(loop, make_request(1))
        await asyncio.wait_for(reader.ended.wait(), 5)
        assert not link.closed
        assert loop.availability.num_worker_losses == 1


async def test_a_broken_invariant_ends_the_epoch_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, metrics, num_checks = make_scheduler(), Metrics(), 0

    def check_sample() -> None:
        nonlocal num_checks
        num_checks += 1
        assert num_checks != 2, "a block is in two places"

    monkeypatch.setattr(scheduler, "check_sample", check_sample)
    async with running_loop(scheduler, metrics) as loop:
        link = LocalLink(loop)
        loop.exchange.worker_ready(CAPACITY, 1, link)
        for _ in range(5):
            readers = [Reader() for _ in range(5)]
            for name, reader in enumerate(readers):
                reader.submit(loop, make_request(name, num_tokens=150))
            while not all(reader.ended.is_set() for reader in readers):
                await asyncio.sleep(0)
                if not loop.exchange.is_connected:
                    assert "invariant" in link.closed
                    link = LocalLink(loop)
                    loop.exchange.worker_ready(CAPACITY, 2, link)
            for name, reader in enumerate(readers):
                prompt = make_request(name).prompt_token_ids
                assert reader.token_ids == reference(prompt, 150, seed=0, sample_index=0, vocab_size=VOCAB_SIZE)
        assert num_checks > 2
        assert metrics.num_invariant_failures == 1
        assert loop.availability.num_worker_losses == 1


def _one_step() -> StepPlan:
    opening = RowOpening(0, 0, (1,), 1, 0, (1,), SamplingParams(), 0, 0)
    return StepPlan(1, 1, openings=(opening,), work_slots=(0,), work_num_tokens=(1,))


@pytest.mark.parametrize(
    "last", ["there is no connection", WorkerStarting("2 of 8 units"), WorkerStarting("0 of 8 units")]
)
def test_the_first_worker_is_waited_for_while_it_comes_further(last: str | WorkerStarting) -> None:
    """The scheduler does not wait for a worker that connects and disconnects, is gone, hangs, or makes no progress."""
    clock, reasons = ManualClock(), []
    options = {"worker_timeout": 60.0, "worker_grace": None, "on_grace_ended": reasons.append}
    availability = WorkerAvailability(100, clock, on_timed_out=reasons.append, **options)
    availability.start_timers()
    for number in range(3):
        availability.worker_missing(WorkerStarting(f"{number} of 8 units"), None)
        clock.end_last()
        assert reasons == []
        assert not availability.refusal()
    availability.worker_missing(last, None)
    clock.end_last()
    assert reasons == ["no worker has been connected for 60 s; try again later"]
    availability.worker_joined(CAPACITY, 100)
    availability.worker_left()
    availability.worker_missing(WorkerStarting("importing torch"), None)
    clock.end_last()
    assert len(reasons) == 2


def test_the_missing_reason_lists_each_rank() -> None:
    """The scheduler waits while any rank makes progress, whether other ranks are connected or not."""
    clock, reasons = ManualClock(), []
    options = {"worker_timeout": 60.0, "worker_grace": None, "on_grace_ended": reasons.append}
    availability = WorkerAvailability(100, clock, on_timed_out=reasons.append, **options)
    availability.start_timers()
    availability.worker_missing("there is no connection", 2)
    for rank, doing in ((10, "importing torch"), (0, "importing torch"), (0, "loading weights")):
        availability.worker_missing(WorkerStarting(doing), rank)
        clock.end_last()
        assert reasons == []
    availability.worker_missing("the worker is ready", 0)
    assert availability.missing_reason == (
        "rank 0: the worker is ready; rank 2: there is no connection; "
        "rank 10: the worker is still starting, importing torch"
    )
    clock.end_last()
    assert len(reasons) == 1
    availability.worker_joined(CAPACITY, 100)
    assert availability.missing_reason == ""


async def test_ten_epochs_without_a_token() -> None:
    async with running_loop() as loop:
        for epoch in range(1, 11):
            Reader().submit(loop, make_request(epoch))
            assert epoch == 1 or loop.availability.is_serving
            link = LocalLink(loop)
            link.closed = "swallows plans"
            loop.exchange.worker_ready(CAPACITY, epoch, link)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            loop.exchange.worker_lost("test")
        assert not loop.availability.is_serving
        loop.exchange.worker_ready(CAPACITY, 11, LocalLink(loop))
        reader = Reader()
        reader.submit(loop, make_request(99))
        await asyncio.wait_for(reader.ended.wait(), 5)
        assert loop.availability.is_serving


async def test_the_publisher_serves_a_few_per_turn_and_in_order() -> None:
    publisher, order, received = Publisher(Observers([]), Clock(), batch_size=3), [], []
    outputs = [SampleRecord(0) for _ in range(10)]
    reader = OutputReader(outputs[0])

    def read(index: int) -> None:
        order.append(index)
        received.extend(reader.take())

    for i, output in enumerate(outputs):
        request = ActiveRequest(make_request(i), [output], StepLoop(make_scheduler(), [], worker_timeout=60.0))
        request.listeners[partial(read, i)] = None
        output.publish(1, 0.0)
        publisher.enqueue(output, request)
    for num_served in (3, 6, 9, 10):
        assert len(order) < num_served
        await asyncio.sleep(0)
        outputs[0].publish(2, 0.0)
        assert len(order) == num_served
    assert order == list(range(10))
    assert [delta.token_ids for delta in received] == [[1]]
    outputs[0].process_output()
    (delta,) = reader.take()
    assert (delta.first_token, delta.token_ids) == (1, [2, 2, 2, 2])


class HeldClock(Clock):
    """A clock that a test moves. No timer fires, and `soon` calls at the next `call_due`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.now = lambda: self.seconds
        self._due: deque[Callable[[], None]] = deque()
        self.soon = self._due.append

    def later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def call_due(self) -> None:
        while self._due:
            self._due.popleft()()


class LeasingLink:
    """A link that computes the steps of each plan and of its lease at once, and keeps their results."""

    def __init__(self) -> None:
        self.worker = SimulatedWorker(100, 4, VOCAB_SIZE, 8, 32)
        self.results: deque[StepResult] = deque()
        self.num_leased_steps = 0

    def send(self, plan: StepPlan) -> None:
        self.num_leased_steps += plan.num_leased_steps
        steps = [plan, *(StepPlan(plan.epoch, plan.step + 1 + i) for i in range(plan.num_leased_steps))]
        self.results.extend(map(self.worker.execute, steps))

    def close(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("seed", range(5))
def test_gaps_between_tokens_sum_to_the_time_of_the_stream(seed: int) -> None:
    """Results of leased steps come in pairs. A token is not said to come 0 s after the token in the same message."""
    rng, clock, metrics, link = random.Random(seed), HeldClock(), Metrics(), LeasingLink()
    loop = StepLoop(make_scheduler(), [metrics], worker_timeout=60.0, clock=clock)
    loop.exchange.worker_ready(replace(CAPACITY, max_leased_steps=8), 1, link)
    request = ActiveRequest(make_request(1, num_tokens=100), [SampleRecord(0)], loop)
    loop.submit(request)
    loop.run_once()
    while link.results:
        message = [link.results.popleft() for _ in range(min(rng.choice((1, 2)), len(link.results)))]
        durations_us = [rng.randrange(500, 5000) for _ in message]
        clock.seconds += sum(durations_us) / 1e6
        for i, (result, duration_us) in enumerate(zip(message, durations_us, strict=True)):
            age = sum(durations_us[i + 1 :]) / 1e6
            loop.exchange.result(replace(result, duration_us=duration_us), age)
        loop.run_once()
        clock.call_due()
    assert request.outputs[0].end is not None
    assert link.num_leased_steps > 50
    gaps, first = (
        metrics.histograms[f"vllm:{name}_seconds"] for name in ("inter_token_latency", "time_to_first_token")
    )
    assert gaps.sum == pytest.approx(clock.seconds - first.sum)
    assert min(gaps.recent) >= 500e-6 * (1 - 1e-6)


def end_of(num_output_tokens: int, reason: EndReason = EndReason.STOP) -> SequenceEnd:
    return SequenceEnd(0, reason, 5, 0, num_output_tokens, None, "", 0.0, None, None)


def test_a_stream_ends_once_and_never_short_of_its_tokens() -> None:
    output = SampleRecord(0)
    for token_id in range(5):
        output.publish(token_id, 0.0)
    with pytest.raises(RuntimeError, match="5 were published"):
        output.finish(end_of(6))
    output.finish(end_of(3))
    output.process_output()
    (delta,) = OutputReader(output).take()
    assert delta.token_ids == [0, 1, 2]
    with pytest.raises(RuntimeError, match="twice"):
        output.finish(end_of(3))
    with pytest.raises(RuntimeError, match="after its end"):
        output.publish(1, 0.0)


class LetterDecoder:
    """A decoder that decodes token i to letter i of the alphabet, with `d` as a stop text."""

    def push(self, token_ids: list[int]) -> DecodedText:
        text = "".join(chr(ord("a") + token_id) for token_id in token_ids)
        if "d" in text:
            return DecodedText(text[: text.index("d")], "d", text.index("d") + 1)
        return DecodedText(text, None, len(token_ids))

    def flush(self) -> DecodedText:
        return DecodedText("", None)


async def test_long_outputs_leave_in_several_deltas() -> None:
    output = SampleRecord(0, LetterDecoder(), with_logprobs=True)
    reader = OutputReader(output)
    logprobs = [TokenLogprobs(0, -1.0, 1) for _ in range(5000)]
    output.add([0] * 5000, logprobs, logprobs, end=end_of(5000, EndReason.LENGTH))
    output.process_output()
    deltas = list(reader.take())
    assert [len(delta.prompt_logprobs) for delta in deltas] == [2048, 2048, 904, 0, 0, 0]
    assert [delta.first_token for delta in deltas] == [0, 0, 0, 0, 2048, 4096]
    assert [len(delta.logprobs) for delta in deltas][3:] == [2048, 2048, 904]
    assert deltas[-1].cumulative_logprob == -5000
    assert deltas[-1].text == "a" * 5000
    assert deltas[-1].end.num_output_tokens == 5000
    assert list(reader.take()) == []
