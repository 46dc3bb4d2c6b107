"""Dials the worker and holds one epoch after the other.

Anything unexpected ends the epoch, whatever it was: the step loop hears `worker_lost`, and the next epoch begins.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.core.plan import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.scheduler import ProtocolError
from scheduler_service.rpc import wire
from scheduler_service.rpc.liveness import Liveness

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Despite its name, the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 1000),
    # A worker that was replaced comes back at another address of the same name.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Only to replace a connection that died without a word: whether the worker lives is judged by heartbeats.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
)
_READY_TIMEOUT = 120.0  # seconds: a worker answers, or gives up, 90 s after Hello at the latest
_JUDGE_INTERVAL = 0.1
_MIN_BACKOFF = 0.1
_MAX_BACKOFF = 1.0


class LinkEvents(Protocol):
    """What the step loop wants to know."""

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: "Session") -> None: ...

    def moved(self, step: int) -> None:
        """The moves of all plans up to this step are done. Comes before the result that told so."""

    def result(self, result: StepResult) -> None: ...

    def worker_lost(self, reason: str) -> None: ...

    def worker_missing(self, reason: str) -> None:
        """There is no session, and why the last attempt to begin one failed."""


class FencedError(Exception):
    """Another scheduler has taken the worker that this one held."""


class _SessionEnded(Exception):
    """Why an epoch is over."""


class _WorkerHangs(_SessionEnded):
    """The worker is there, but it does nothing."""


class WorkerLink:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        events: LinkEvents,
        *,
        instance_id: str,
        model_digest: bytes,
        pipeline_depth: int,
        on_plan_sent: Callable[[int], None] = lambda num_bytes: None,
        on_worker_hangs: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_plan_sent` gets the size of every plan in bytes. `on_worker_hangs` is called when a worker was given up
        that is connected but silent: whoever runs it may end it."""
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._events = events
        self._instance_id = instance_id
        self._model_digest = model_digest
        self._pipeline_depth = pipeline_depth
        self._on_plan_sent = on_plan_sent
        self._on_worker_hangs = on_worker_hangs
        # Rises from process to process by its start time, and within one by the low bits.
        self._epoch = (time.time_ns() // 1_000_000) << 20
        self._first_capacity: WorkerCapacity | None = None

    async def run(self) -> None:
        """Until cancelled. Raises FencedError."""
        backoff, told = _MIN_BACKOFF, ""
        while True:
            self._epoch += 1
            session = Session(self._events, self._epoch, self._on_plan_sent)
            reason = await self._hold(session)
            if session.is_ready:
                self._events.worker_lost(reason)
                backoff, told = _MIN_BACKOFF, ""
            else:
                if reason != told:
                    logger.warning("no session with the worker: %s", reason)
                told = reason
                self._events.worker_missing(reason)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF)

    async def _hold(self, session: "Session") -> str:
        """One session, to its end and why it ended."""
        call = self._stub.Execute(wait_for_ready=True)
        try:
            await _write(call, wire.encode_hello(self._instance_id, session.epoch, self._pipeline_depth))
            capacity = self._admit(await asyncio.wait_for(_read(call), _READY_TIMEOUT))
            logger.info(
                "worker %s joined in epoch %d: %s, %s, %d blocks of %d tokens",
                capacity.worker_id,
                session.epoch,
                capacity.device,
                capacity.dtype,
                capacity.num_device_blocks,
                capacity.block_size,
            )
            await session.hold(call, capacity)
        except TimeoutError:
            self._on_worker_hangs()
            return f"the worker has not answered Hello in {_READY_TIMEOUT:.0f} s"
        except _WorkerHangs as error:
            self._on_worker_hangs()
            return str(error)
        except (_SessionEnded, ProtocolError) as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            return _describe(error)
        finally:
            call.cancel()

    def _admit(self, answer: wire.WorkerMessage) -> WorkerCapacity:
        """The worker's capacity if it fits what this scheduler serves. Raises _SessionEnded, FencedError."""
        if isinstance(answer, wire.Refusal):
            self._take_refusal(answer)
            raise _SessionEnded(f"refused: {answer.message}")
        if not isinstance(answer, WorkerCapacity):
            raise ProtocolError(f"the worker answered Hello with {type(answer).__name__}")
        if answer.model_digest != self._model_digest:
            raise _SessionEnded(
                f"the worker serves another model (digest {answer.model_digest.hex()[:16]}, here "
                f"{self._model_digest.hex()[:16]}); start both with the same --model"
            )
        first = self._first_capacity or answer
        for name in ("vocab_size", "block_size"):
            if getattr(answer, name) != getattr(first, name):
                raise _SessionEnded(
                    f"the worker came back with {name} {getattr(answer, name)}, it was {getattr(first, name)}; "
                    "restart the scheduler too"
                )
        self._first_capacity = first
        return answer

    def _take_refusal(self, refusal: wire.Refusal) -> None:
        if refusal.reason is not wire.RefusalReason.STALE_EPOCH:
            return
        if self._first_capacity is not None and refusal.instance_id != self._instance_id:
            raise FencedError(f"scheduler {refusal.instance_id} has taken the worker in epoch {refusal.epoch}")
        self._epoch = max(self._epoch, refusal.epoch)


class Session:
    """One epoch on one stream. The step loop's way to the worker while it lasts."""

    def __init__(self, events: LinkEvents, epoch: int, on_plan_sent: Callable[[int], None]) -> None:
        self.epoch = epoch
        self.is_ready = False
        self._events = events
        self._on_plan_sent = on_plan_sent
        self._outbox: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._liveness = Liveness(time.monotonic())
        self._last_moved_step = 0

    def send(self, plan: StepPlan) -> None:
        message = wire.encode_plan(plan)
        self._on_plan_sent(message.ByteSize())
        has_moves = bool(plan.swap_out_device_blocks or plan.swap_in_host_blocks)
        self._liveness.sent(plan.step, sum(plan.work_num_tokens), time.monotonic(), has_moves=has_moves)
        self._outbox.put_nowait(message)

    def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    async def hold(self, call: grpc.aio.StreamStreamCall, capacity: WorkerCapacity) -> NoReturn:
        """Serve the session to its end. Raises why it ended."""
        self._liveness = Liveness(time.monotonic())
        self.is_ready = True
        self._events.worker_ready(capacity, self.epoch, self)
        parts = (self._receive(call), self._transmit(call), self._watch())
        tasks: list[asyncio.Future[None]] = [asyncio.create_task(part) for part in parts]
        try:
            ends: list[asyncio.Future[Any]] = [self._closed, *tasks]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._closed in done:
                raise _SessionEnded(self._closed.result())
            raise done.pop().exception() or AssertionError("the parts of a session end by raising only")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            message = await _read(call)
            now = time.monotonic()
            self._liveness.heard(now)
            if not isinstance(message, StepResult | wire.Heartbeat):
                raise ProtocolError(f"the worker sent {type(message).__name__} in the middle of a session")
            if message.epoch != self.epoch:
                raise ProtocolError(f"a {type(message).__name__} of epoch {message.epoch} in epoch {self.epoch}")
            if message.last_moved_step > self._last_moved_step:
                self._last_moved_step = message.last_moved_step
                self._liveness.moved(message.last_moved_step, now)
                self._events.moved(message.last_moved_step)
            if isinstance(message, StepResult):
                self._liveness.finished(message.step, message.duration_us / 1e6, now)
                self._events.result(message)

    async def _transmit(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            await _write(call, await self._outbox.get())

    async def _watch(self) -> NoReturn:
        while True:
            await asyncio.sleep(_JUDGE_INTERVAL)
            verdict = self._liveness.judge(time.monotonic())
            if verdict:
                raise _WorkerHangs(verdict)


async def _read(call: grpc.aio.StreamStreamCall) -> wire.WorkerMessage:
    message = await call.read()
    if message is grpc.aio.EOF:
        raise await _ended(call)
    return wire.decode_worker_message(message)


async def _write(call: grpc.aio.StreamStreamCall, message: worker_pb2.ExecuteRequest) -> None:
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # it had ended before, which the reader has not seen yet
        raise await _ended(call) from None


async def _ended(call: grpc.aio.StreamStreamCall) -> _SessionEnded:
    return _SessionEnded(f"the worker ended the stream ({await call.code()}: {await call.details()})")


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"the stream broke ({error.code().name}: {error.details()})"
