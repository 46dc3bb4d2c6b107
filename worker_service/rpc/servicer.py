"""The worker's gRPC service. One Execute stream is one session, and the session with the highest epoch is active."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio

from pagewire.common.process.event_loop import call_from_thread
from pagewire.common.process.log_repetition import Repetition
from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import (
    CertificateValidity,
    GrammarReport,
    Heartbeat,
    Hello,
    Refusal,
    StepPlan,
    StepResult,
    StepResults,
    WorkerProtocolError,
    WorkerStarting,
)
from pagewire.common.wire.transport.link_secret import LinkSecret, has_secret
from pagewire.common.wire.worker_wire import Response, decode_request, encode_response
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2 as pb
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2_grpc
from worker_service.engine import Engine, EngineSession, Outcome, exit_process
from worker_service.rpc.session import Session, SessionRegister

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
# Time limit for a step of an earlier session when a new session begins. A scheduler gives up a step after 30 s at the
# earliest. The remaining part of its `--worker-timeout` is for a new process that loads the model.
BEGIN_TIMEOUT_S = 30.0
_WRITE_TIMEOUT_S = 5.0  # for a peer that does not read
_CLOSE_TIMEOUT_S = 2 * _WRITE_TIMEOUT_S
_SHUTTING_DOWN = (grpc.StatusCode.UNAVAILABLE, "the worker is shutting down")


class _SessionEnded(Exception):
    """Raised to end a session with a scheduler. It carries the gRPC status that ends the session's stream."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """The worker's gRPC service, by which a scheduler sends step plans and receives results.

    It runs on the event loop. The engine does all computation on its own thread.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        heartbeat_interval_s: float = 1.0,
        begin_timeout_s: float = BEGIN_TIMEOUT_S,
        on_stuck: Callable[[str], NoReturn] = exit_process,
        client_names: frozenset[str] | None = None,
        link_secret: LinkSecret | None = None,
        certificates: Callable[[], tuple[CertificateValidity, ...]] = tuple,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the service.

        `on_stuck` is called when the steps of an earlier session do not finish within `begin_timeout_s` seconds after a
        new session has asked to begin.

        A peer must present a certificate with one of `client_names`, and the secret `link_secret`. None disables the
        check. With both None, any scheduler that connects may command this worker.

        `certificates` returns the certificates in use, which heartbeats report. `clock` returns seconds of Unix time,
        with which epochs are compared.
        """
        self._engine = engine
        self._client_names = client_names
        self._link_secret = link_secret
        self._certificates = certificates
        self._heartbeat_interval_s = heartbeat_interval_s
        self._begin_timeout_s = begin_timeout_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._repetition = Repetition()  # of sessions that never begin: a refused scheduler connects again and again
        self._register = SessionRegister()
        self._loaded = asyncio.Event()
        self._holder: _Stream | None = None
        self._is_closing = False

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    def set_loaded(self) -> None:
        """Allow sessions with schedulers to begin. Call this when the engine has loaded the model."""
        self._loaded.set()

    async def close(self) -> None:
        """End the current session and refuse new sessions, because the worker shuts down.

        Return when the scheduler has received the reason, or after a timeout.
        """
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
            # A stopping worker has already logged that it stops.
            self._repetition.tell(
                logger, logging.DEBUG if self._is_closing else logging.WARNING, f"session ended: {end}"
            )
            await context.abort(end.code, str(end))

    async def _serve(self, requests: AsyncIterator[pb.ExecuteRequest], context: grpc.aio.ServicerContext) -> None:
        """Serve one Execute stream, which is one session with a scheduler, until the scheduler closes it.

        Raises WorkerProtocolError if the scheduler violates the protocol, _SessionEnded if the worker ends the session,
        and Unreadable if a message cannot be decoded.
        """
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
        """Raise _SessionEnded if the client lacks the secret or the TLS certificate that this worker requires."""
        self._check_secret(context)
        if self._client_names is None:
            return
        identity = context.auth_context()
        names = {name.decode(errors="replace") for name in identity.get("peer_dns", ())}
        if not names & self._client_names:
            reason = f"the client's certificate has the names {sorted(names)}; --tls-client-names lists none of them"
            raise _SessionEnded(grpc.StatusCode.PERMISSION_DENIED, reason)

    def _check_secret(self, context: grpc.aio.ServicerContext) -> None:
        """Raise _SessionEnded if the scheduler did not send the secret that this worker requires.

        The error is also raised if the scheduler sends a secret and this worker has no --link-secret-file.
        """
        metadata = context.invocation_metadata() or ()
        if self._link_secret is None:
            reason = (
                "the scheduler sent a secret, but this worker has no --link-secret-file" if has_secret(metadata) else ""
            )
        elif not has_secret(metadata):
            reason = "the scheduler sent no secret, but this worker has a --link-secret-file"
        elif not self._link_secret.is_in(metadata):
            reason = "the scheduler's --link-secret-file and this worker's contain different secrets"
        else:
            reason = ""
        if reason:
            raise _SessionEnded(grpc.StatusCode.UNAUTHENTICATED, reason)

    async def _begin(self, stream: "_Stream") -> None:
        """Begin a session: wait until the model is loaded and all earlier steps have finished, then send the capacity.

        While the model loads, send its progress at each heartbeat interval. If earlier steps do not finish in time,
        `on_stuck` is called.
        """
        while not self._loaded.is_set():
            await stream.write(WorkerStarting(self._engine.loading))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._loaded.wait(), self._heartbeat_interval_s)
        begun = asyncio.Event()
        on_begun = partial(call_from_thread, stream.loop, begun.set)  # called on the compute thread
        self._engine.begin(stream.engine_session, stream.session.epoch, on_begun)
        try:
            await asyncio.wait_for(begun.wait(), self._begin_timeout_s)
        except TimeoutError:
            self._on_stuck(f"a step of an earlier session has not finished in {self._begin_timeout_s:.0f} s")
        assert self._engine.ready is not None
        stream.session.max_leased_steps = self._engine.ready.max_leased_steps
        await stream.write(self._engine.ready)


class _Stream:
    """One session with a scheduler: an Execute RPC, from the scheduler's hello message to the end of the stream."""

    def __init__(
        self,
        requests: AsyncIterator[pb.ExecuteRequest],
        context: grpc.aio.ServicerContext,
        session: Session,
        engine: Engine,
        certificates: Callable[[], tuple[CertificateValidity, ...]],
    ) -> None:
        self._requests = requests
        self.context = context
        self.loop = asyncio.get_running_loop()
        handler = asyncio.current_task()
        assert handler is not None
        self.handler = handler  # ends when the peer has received the reason for the session's end
        self.session = session
        self._engine = engine
        self._certificates = certificates
        self._outgoing: asyncio.Queue[StepResult | Heartbeat | GrammarReport] = asyncio.Queue()
        soon = partial(call_from_thread, self.loop)  # the engine calls back on its own threads
        self.engine_session = EngineSession(
            deliver=lambda outcome: soon(self._take, outcome),
            on_moved=lambda: soon(self._put_heartbeat),
            on_grammar=lambda report: soon(self._outgoing.put_nowait, report),
        )
        self._end: asyncio.Future[_SessionEnded | WorkerProtocolError] = self.loop.create_future()
        self._may_write = True
        self._written = asyncio.Event()  # set while no write is in progress
        self._written.set()

    def end(self, code: grpc.StatusCode, message: str) -> None:
        """End the session with this gRPC status and message. The session's queued steps are dropped."""
        self._finish(_SessionEnded(code, message))

    async def exchange(self, heartbeat_interval_s: float) -> None:
        """Receive plans and send results and heartbeats until the scheduler closes the stream.

        Raises _SessionEnded or WorkerProtocolError if the session ends in another way.
        """
        await self.until_ended(self._receive(), self._transmit(), self._beat(heartbeat_interval_s))

    async def until_ended(self, *parts: Coroutine[Any, Any, None]) -> None:
        """Run the coroutines at the same time until the first is done or the session ends, then cancel the others.

        If the session has ended, raises its _SessionEnded or WorkerProtocolError. If a coroutine failed, raises its
        exception.
        """
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
        """Send a message to the scheduler. Drop the message if `until_ended` is ending the coroutines."""
        if not self._may_write:
            return
        self._written.clear()
        try:
            await self.context.write(encode_response(message))
        finally:
            self._written.set()

    async def _finish_writing(self) -> None:
        """Prevent further messages to the scheduler, and wait a limited time for a write in progress.

        gRPC cannot cancel a write, and no status can be sent during a write.
        """
        self._may_write = False
        with suppress(TimeoutError):  # a peer that does not read would not read a status either
            await asyncio.wait_for(self._written.wait(), _WRITE_TIMEOUT_S)

    async def _receive(self) -> None:
        async for request in self._requests:
            plan = decode_request(request)
            if not isinstance(plan, StepPlan):
                raise WorkerProtocolError("hello came twice on one stream")
            self.session.plan(plan.epoch, plan.step, plan.num_leased_steps)
            self._engine.submit(self.engine_session, plan)

    async def _transmit(self) -> None:
        held: StepResult | None = None
        while True:
            message: Response = await self._outgoing.get()
            if isinstance(message, StepResult):
                # Before the write: the next plan may arrive before the write returns here.
                num_later = self.session.answer(message.step, message.num_dropped_steps)
                if held is not None:
                    message, held = StepResults((held, message)), None
                elif num_later > 1 or (num_later and self.session.num_unfinished > 1):
                    # A message for two steps costs half as much. Without a further plan the last result comes alone,
                    # so that the next plan arrives while a step is computed.
                    held = message
                    continue
            await self.write(message)

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if self._outgoing.empty():  # otherwise the peer does not read, and heartbeats must not pile up
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
