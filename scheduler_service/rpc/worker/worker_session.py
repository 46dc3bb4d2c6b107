"""One epoch with one worker process: plans down, results and heartbeats up, and the judgement whether it lives."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import grpc
import grpc.aio

from pagewire.common.messages import (
    CertificateLife,
    GrammarReport,
    Heartbeat,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerProtocolError,
)
from pagewire.common.transport.draining import cancel
from pagewire.common.worker_wire import Response, decode_response, encode_request
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.rpc.worker.liveness import Liveness

_JUDGE_INTERVAL = 0.1


class SessionEvents(Protocol):
    """The step loop, or one rank's share of it: it hears of a session."""

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: "Session") -> None:
        """May raise SessionEnded."""

    def moved(self, step: int) -> None:
        """The moves of all plans up to this step are done. Comes before the result that told so."""

    def grammar_ready(self, grammar_id: int, error: str) -> None:
        """A grammar of a plan is ready, or (with an error) cannot be used. May raise WorkerProtocolError."""

    def result(self, result: StepResult) -> None:
        """May raise WorkerProtocolError."""


class SessionEnded(Exception):
    """The epoch is over; the text says why."""


class WorkerHangs(SessionEnded):
    """The worker is connected, but it does nothing."""


class Session:
    """One epoch on one stream: the step loop's way to the worker while it lasts."""

    def __init__(self, events: SessionEvents, epoch: int, on_plan_sent: Callable[[int], None]) -> None:
        self.epoch = epoch
        self.is_ready = False
        self._events = events
        self._on_plan_sent = on_plan_sent
        self._outbox: asyncio.Queue[worker_pb2.ExecuteRequest] = asyncio.Queue()
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._liveness = Liveness(time.monotonic())
        self._last_moved_step = 0

    def send(self, plan: StepPlan) -> None:
        message = encode_request(plan)
        self._on_plan_sent(message.ByteSize())
        self.pass_on(plan, message)

    def pass_on(self, plan: StepPlan, message: worker_pb2.ExecuteRequest) -> None:
        """Send a plan that is encoded already."""
        has_moves = bool(plan.swap_out_device_blocks or plan.swap_in_host_blocks)
        self._liveness.sent(plan.step, sum(plan.work_num_tokens), time.monotonic(), has_moves=has_moves)
        self._outbox.put_nowait(message)

    def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    async def hold(
        self,
        call: grpc.aio.StreamStreamCall,
        capacity: WorkerCapacity,
        on_certificates: Callable[[tuple[CertificateLife, ...]], object],
    ) -> NoReturn:
        """Serve the session to its end, and raise the reason for that. `on_certificates` hears of those that the worker
        uses."""
        self._on_certificates = on_certificates
        self._liveness = Liveness(time.monotonic())
        self._events.worker_ready(capacity, self.epoch, self)
        self.is_ready = True
        parts = (self._receive(call), self._transmit(call), self._watch())
        tasks: list[asyncio.Future[None]] = [asyncio.create_task(part) for part in parts]
        try:
            ends: list[asyncio.Future[Any]] = [self._closed, *tasks]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._closed in done:
                raise SessionEnded(self._closed.result())
            raise done.pop().exception() or AssertionError("the parts of a session end by raising only")
        finally:
            await cancel(tasks)

    async def _receive(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            message = await read(call)
            now = time.monotonic()
            self._liveness.heard(now)
            if not isinstance(message, StepResult | Heartbeat | GrammarReport):
                raise WorkerProtocolError(f"the worker sent {type(message).__name__} in the middle of a session")
            if message.epoch != self.epoch:
                raise WorkerProtocolError(f"a {type(message).__name__} of epoch {message.epoch} in epoch {self.epoch}")
            if isinstance(message, Heartbeat):
                self._on_certificates(message.certificates)
            if isinstance(message, GrammarReport):
                self._events.grammar_ready(message.grammar_id, message.error)
                continue
            if message.last_moved_step > self._last_moved_step:
                self._last_moved_step = message.last_moved_step
                self._liveness.moved(message.last_moved_step, now)
                self._events.moved(message.last_moved_step)
            if isinstance(message, StepResult):
                self._liveness.finished(message.step, message.duration_us / 1e6, now)
                self._events.result(message)

    async def _transmit(self, call: grpc.aio.StreamStreamCall) -> NoReturn:
        while True:
            await write(call, await self._outbox.get())

    async def _watch(self) -> NoReturn:
        while True:
            await asyncio.sleep(_JUDGE_INTERVAL)
            verdict = self._liveness.judge(time.monotonic())
            if verdict:
                raise WorkerHangs(verdict)


async def read(call: grpc.aio.StreamStreamCall) -> Response:
    """Read the next message. Raises SessionEnded, WorkerProtocolError, AioRpcError."""
    message = await call.read()
    if message is grpc.aio.EOF:
        raise await _ended(call)
    return decode_response(message)


async def write(call: grpc.aio.StreamStreamCall, message: worker_pb2.ExecuteRequest) -> None:
    """Write a message. Raises SessionEnded, AioRpcError."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:  # it had ended before, which the reader has not seen yet
        raise await _ended(call) from None


async def _ended(call: grpc.aio.StreamStreamCall) -> SessionEnded:
    return SessionEnded(f"the worker ended the stream ({await call.code()}: {await call.details()})")
