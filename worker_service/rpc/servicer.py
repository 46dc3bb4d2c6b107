"""The worker's gRPC service: one Execute stream is one session, and the highest epoch holds the worker."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from pagewire.common.process.log_repetition import Repetition
from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import (
    CertificateLife,
    GrammarReport,
    Heartbeat,
    Hello,
    Refusal,
    StepPlan,
    StepResult,
    WorkerProtocolError,
    WorkerStarting,
)
from pagewire.common.wire.transport.link_secret import LinkSecret, shows_one
from pagewire.common.wire.worker_wire import Response, decode_request, encode_response
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2 as pb
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2_grpc
from worker_service.engine import Engine, EngineSession, Outcome, exit_process
from worker_service.rpc.session import Session, SessionRegister

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
# How long a step of an earlier session may still take when a new one begins. A scheduler gives up a step after 30 s at
# the earliest; what is left then of its `--worker-timeout` is for a new process, and for loading the model.
BEGIN_TIMEOUT_S = 30.0
_WRITE_TIMEOUT_S = 5.0  # for a peer that does not read
_CLOSE_TIMEOUT_S = 2 * _WRITE_TIMEOUT_S
_SHUTTING_DOWN = (grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")


class _SessionEnded(Exception):
    """Why a session is over, as the status its stream ends with."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Lives on the event loop; all computing is the engine's."""

    def __init__(
        self,
        engine: Engine,
        *,
        heartbeat_interval_s: float = 1.0,
        begin_timeout_s: float = BEGIN_TIMEOUT_S,
        on_stuck: Callable[[str], NoReturn] = exit_process,
        client_names: frozenset[str] | None = None,
        link_secret: LinkSecret | None = None,
        certificates: Callable[[], tuple[CertificateLife, ...]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_stuck`: called when earlier steps do not finish within `begin_timeout_s` of a new session's hello.
        `client_names`: a peer's certificate must bear one of them, and `link_secret` is what it must show; None:
        any scheduler that connects may command this worker.
        `certificates` returns those in use, which heartbeats tell.
        `clock`: seconds of Unix time, which epochs are compared with."""
        self._engine = engine
        self._client_names = client_names
        self._link_secret = link_secret
        self._certificates = certificates
        self._heartbeat_interval_s = heartbeat_interval_s
        self._begin_timeout_s = begin_timeout_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._repetition = Repetition()  # of sessions that never begin: who is refused dials again
        self._register = SessionRegister()
        self._loaded = asyncio.Event()
        self._holder: _Stream | None = None
        self._is_closing = False

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    def set_loaded(self) -> None:
        """The engine has loaded: sessions may begin."""
        self._loaded.set()

    async def close(self) -> None:
        """End the session there is, take no more, and return when the scheduler has been told why."""
        self._is_closing = True
        if self._holder:
            self._holder.end(*_SHUTTING_DOWN)
            await asyncio.wait([self._holder.handler], timeout=_CLOSE_TIMEOUT_S)

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecuteRequest], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            self._check_peer(context)
            await self._serve(aiter(request_iterator), context)
        except WorkerProtocolError as error:
            self._repetition.tell(logger, logging.ERROR, f"protocol error: {error}")
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except _SessionEnded as end:
            # A worker that stops has said so.
            self._repetition.tell(
                logger, logging.DEBUG if self._is_closing else logging.WARNING, f"session ended: {end}"
            )
            await context.abort(end.code, str(end))

    async def _serve(self, requests: AsyncIterator[pb.ExecuteRequest], context: grpc.aio.ServicerContext) -> None:
        """One stream to its end. Raises WorkerProtocolError, _SessionEnded, Unreadable."""
        request = await anext(requests, None)
        if request is None:
            return
        hello = decode_request(request)
        if not isinstance(hello, Hello):
            raise WorkerProtocolError("the first message is a plan, not hello")
        if self._is_closing:
            raise _SessionEnded(*_SHUTTING_DOWN)
        session = self._register.hello(hello, self._clock())
        if isinstance(session, Refusal):
            self._repetition.tell(logger, logging.WARNING, f"refused instance {hello.instance_id}: {session.message}")
            await context.write(encode_response(session))
            return
        stream = _Stream(requests, context, session, self._engine, self._certificates)
        if self._holder:
            self._holder.end(
                grpc.StatusCode.ABORTED, f"instance {session.instance_id} took over with epoch {session.epoch}"
            )
        self._holder = stream
        try:
            await stream.until_ended(self._begin(stream))
            self._repetition.forget()
            logger.info("scheduler %s has begun epoch %d", session.instance_id, session.epoch)
            await stream.exchange(self._heartbeat_interval_s)
            logger.info("scheduler %s has ended epoch %d", session.instance_id, session.epoch)
        finally:
            stream.engine_session.end()
            if self._holder is stream:
                self._holder = None

    def _check_peer(self, context: grpc.aio.ServicerContext) -> None:
        """Raises _SessionEnded for a peer that is not the scheduler."""
        self._check_secret(context)
        if self._client_names is None:
            return
        identity = context.auth_context()
        names = {name.decode(errors="replace") for name in identity.get("peer_dns", ())}
        if not names & self._client_names:
            reason = f"the client's certificate is not a scheduler's: it bears the names {sorted(names)}"
            raise _SessionEnded(grpc.StatusCode.PERMISSION_DENIED, reason)

    def _check_secret(self, context: grpc.aio.ServicerContext) -> None:
        """Raises _SessionEnded. Who shows a secret to a worker that would not look at it is told so."""
        metadata = context.invocation_metadata() or ()
        if self._link_secret is None:
            reason = "this worker has no --link-secret-file, but the scheduler has" if shows_one(metadata) else ""
        elif not shows_one(metadata):
            reason = "the scheduler shows no secret, but this worker has a --link-secret-file"
        elif not self._link_secret.is_in(metadata):
            reason = "the secret of the scheduler's --link-secret-file is not that of this worker's"
        else:
            reason = ""
        if reason:
            raise _SessionEnded(grpc.StatusCode.UNAUTHENTICATED, reason)

    async def _begin(self, stream: "_Stream") -> None:
        """Tell how far loading is, then answer with the worker's capacity once every earlier step has finished."""
        while not self._loaded.is_set():
            await stream.write(WorkerStarting(self._engine.loading))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._loaded.wait(), self._heartbeat_interval_s)
        begun = asyncio.Event()
        on_begun = partial(stream.loop.call_soon_threadsafe, begun.set)  # on the engine's thread
        self._engine.begin(stream.engine_session, stream.session.epoch, on_begun)
        try:
            await asyncio.wait_for(begun.wait(), self._begin_timeout_s)
        except TimeoutError:
            self._on_stuck(f"a step of an earlier session has not finished in {self._begin_timeout_s:.0f} s")
        assert self._engine.ready is not None
        await stream.write(self._engine.ready)


class _Stream:
    """The call that holds an epoch, from its hello to its end."""

    def __init__(
        self,
        requests: AsyncIterator[pb.ExecuteRequest],
        context: grpc.aio.ServicerContext,
        session: Session,
        engine: Engine,
        certificates: Callable[[], tuple[CertificateLife, ...]],
    ) -> None:
        self._requests = requests
        self.context = context
        self.loop = asyncio.get_running_loop()
        handler = asyncio.current_task()
        assert handler is not None
        self.handler = handler  # over when the peer has been told how the session ended
        self.session = session
        self._engine = engine
        self._certificates = certificates
        self._outgoing: asyncio.Queue[StepResult | Heartbeat | GrammarReport] = asyncio.Queue()
        soon = self.loop.call_soon_threadsafe  # the engine calls on threads of its own
        self.engine_session = EngineSession(
            deliver=lambda outcome: soon(self._take, outcome),
            on_moved=lambda: soon(self._put_heartbeat),
            on_grammar=lambda report: soon(self._outgoing.put_nowait, report),
        )
        self._end: asyncio.Future[_SessionEnded | WorkerProtocolError] = self.loop.create_future()
        self._may_write = True
        self._written = asyncio.Event()  # no write is under way
        self._written.set()

    def end(self, code: grpc.StatusCode, message: str) -> None:
        """End the session from outside. Its queued steps are dropped."""
        self._finish(_SessionEnded(code, message))

    async def exchange(self, heartbeat_interval_s: float) -> None:
        """Plans in, results and heartbeats out, until the scheduler closes the stream. Raises why it ended else."""
        await self.until_ended(self._receive(), self._transmit(), self._beat(heartbeat_interval_s))

    async def until_ended(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run the parts until one of them is done or the session ends. Raises why it ended."""
        tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait([self._end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                raise self._end.result()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await self._finish_writing()
            await cancel(tasks)
            self._may_write = True

    async def write(self, message: Response) -> None:
        """Nothing is written once the parts are being ended."""
        if not self._may_write:
            return
        self._written.clear()
        try:
            await self.context.write(encode_response(message))
        finally:
            self._written.set()

    async def _finish_writing(self) -> None:
        """gRPC cannot take a write back: while one is under way, no status can be sent."""
        self._may_write = False
        with suppress(TimeoutError):  # the peer does not read: it will not read a status either
            await asyncio.wait_for(self._written.wait(), _WRITE_TIMEOUT_S)

    async def _receive(self) -> None:
        async for request in self._requests:
            plan = decode_request(request)
            if not isinstance(plan, StepPlan):
                raise WorkerProtocolError("hello came twice on one stream")
            self.session.plan(plan.epoch, plan.step)
            self._engine.submit(self.engine_session, plan)

    async def _transmit(self) -> None:
        while True:
            message = await self._outgoing.get()
            if isinstance(message, StepResult):
                # Before the write: its answer, the next plan, may arrive before the write returns here.
                self.session.answer(message.step)
            await self.write(message)

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if self._outgoing.empty():  # else the peer does not read, and heartbeats must not pile up
                self._put_heartbeat()

    def _put_heartbeat(self) -> None:
        progress = self.engine_session
        self._outgoing.put_nowait(
            Heartbeat(
                self.session.epoch,
                progress.last_started_step,
                progress.last_finished_step,
                progress.last_moved_step,
                self._certificates(),
            )
        )

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, StepResult):
            self._outgoing.put_nowait(outcome)
        elif isinstance(outcome, WorkerProtocolError):
            self._finish(outcome)
        else:
            self.end(grpc.StatusCode.INTERNAL, f"a step failed: {outcome}")

    def _finish(self, end: _SessionEnded | WorkerProtocolError) -> None:
        self.engine_session.end()
        if not self._end.done():
            self._end.set_result(end)
