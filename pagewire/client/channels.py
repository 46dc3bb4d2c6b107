"""The gRPC connections of a client to one server, one for each event loop.

A connection is opened at its first use. gRPC does not survive a fork while a channel of `grpc.aio` is open: calls in
the child would hang or crash. Therefore idle connections of the background loop are closed before a fork, and parent
and child open new connections afterwards. If any other connection is open at the fork, calls in the child fail with an
error that explains the cause.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack
from weakref import WeakSet

import grpc
import grpc.aio

from pagewire.client import background_loop, wire
from pagewire.client.arguments import check_text, refuse_unknown, require
from pagewire.client.errors import DeadlineExceeded, PagewireError, Unavailable
from pagewire.common.process.watched_files import NamedFile
from pagewire.common.wire.generate_many import GenerateManyClient, is_broken
from pagewire.common.wire.transport.dialling import open_channel
from pagewire.common.wire.transport.http_proxy import http_proxy_of
from pagewire.common.wire.transport.tls import TlsFiles
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A long prefill sends no data for a while. Keepalive pings continue.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Reconnect soon after a restarted server is available.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
# The size limit in bytes for a request on a shared call. A server that refuses an oversized message ends the whole
# call.
MAX_SHARED_BYTES = 1 << 20
Metadata = tuple[tuple[str, str], ...]
_FORKED = (
    "this process was forked while its parent had a call in progress or an open AsyncClient, which gRPC does not "
    "survive: close the client before the fork, or start processes by 'spawn' (multiprocessing.get_context)"
)


class ConnectionOptions(TypedDict, total=False):
    """The keyword options of a client that authenticate the client and verify the server.

    `tls_ca` is the PEM file of the authority that signed the server's certificate. `tls_cert` and `tls_key` are the PEM
    files of the client's certificate and private key. `api_key` identifies the client's tenant.
    """

    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    api_key: str | None


# Receives the responses to a request, and at its end None, or the error that ended the request.
Put = Callable[[pb.GenerateResponse | PagewireError | None], None]


class NotShared(PagewireError):
    """Raised if the server does not support GenerateMany, the gRPC method by which several requests share one call. The
    gRPC status is UNIMPLEMENTED."""


@dataclass(slots=True)
class _Request:
    """A generation request in flight on a shared gRPC call."""

    put: Put
    num_open: int  # samples that have not ended
    timer: asyncio.TimerHandle | None = None


class GenerateManyCall:
    """An open gRPC call of the method GenerateMany, which carries many generation requests at the same time.

    A request that is too large to share a call gets a call of its own. Such a call has `is_alone` set, and it ends with
    its request.
    """

    def __init__(self, call: grpc.aio.StreamStreamCall, url: str, *, is_alone: bool = False) -> None:
        self._client = GenerateManyClient(call)
        self._url = url
        self.is_alone = is_alone
        self._requests: dict[int, _Request] = {}
        self.is_over = False
        self._receiving = asyncio.create_task(self._receive())

    def submit(self, request: pb.GenerateRequest, put: Put, timeout: float | None) -> Callable[[], None]:
        """Send a generation request on this gRPC call. Return a function that aborts the request.

        The callback `put` receives the responses and the end of the request, but nothing after the abort. Aborting a
        request that has ended does nothing. `timeout` is in seconds.
        """
        stream_id, num_samples = self._client.next_stream_id, wire.num_samples(request)
        submitted = self._requests[stream_id] = _Request(put, num_samples)
        if timeout is not None:
            late = DeadlineExceeded(wire.TIMEOUT_PASSED, code=grpc.StatusCode.DEADLINE_EXCEEDED)
            submitted.timer = asyncio.get_running_loop().call_later(timeout, put, late)
        submission = wire.message(pb.Submission, stream_id=stream_id, request=request, timeout_seconds=timeout)
        self._client.submit(pb.GenerateManyRequest(submit=submission), num_samples)
        return partial(self._abort, stream_id)

    async def close(self) -> None:
        self._client.end()
        await asyncio.gather(self._receiving, return_exceptions=True)

    def _abort(self, stream_id: int) -> None:
        if self._end(stream_id) is not None and not self.is_over:
            self._client.abort(stream_id)

    def _end(self, stream_id: int) -> _Request | None:
        """Remove a request from this gRPC call. If the call carries only this request, cancel the call.

        Return the removed request, or None if the request has already ended.
        """
        request = self._requests.pop(stream_id, None)
        if request is not None and request.timer is not None:
            request.timer.cancel()
        if request is not None and self.is_alone:
            self._client.call.cancel()
        return request

    def _finish(self, stream_id: int, failure: PagewireError | None) -> None:
        if request := self._end(stream_id):
            request.put(failure)

    async def _receive(self) -> None:
        failure: PagewireError = wire.closed()
        try:
            async for message in self._client.call:
                self._client.begin()
                self._take(message)
            failure = Unavailable(f"the server at {self._url} has shut down", code=grpc.StatusCode.UNAVAILABLE)
        except grpc.RpcError as error:
            failure = wire.decode_error(error, self._url)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                failure = NotShared(str(failure), code=failure.code)
            elif is_broken(error):
                failure = Unavailable(f"the connection to {self._url} broke", code=grpc.StatusCode.UNAVAILABLE)
        finally:
            self.is_over = True
            self._client.end()
            for stream_id in list(self._requests):
                self._finish(stream_id, failure)

    def _take(self, message: pb.GenerateManyResponse) -> None:
        for entry in message.deltas:
            stream_id = entry.stream_id - entry.delta.index
            if request := self._requests.get(stream_id):
                request.put(entry.delta)
                request.num_open -= entry.delta.HasField("usage")
                if request.num_open == 0:
                    self._finish(stream_id, None)
        for failed in message.failures:
            self._finish(failed.stream_id, wire.decode_failure(failed))


class Connection:
    """A gRPC channel of a client, and the GenerateMany calls open on the channel. A connection belongs to one event
    loop.

    `can_share` is False if the server does not support the method GenerateMany, by which several requests share a call.
    """

    def __init__(self, channel: Any, url: str, metadata: Metadata) -> None:
        self.channel = channel
        self.metadata = metadata
        self._url = url
        self._closed = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.stub = pb_grpc.SchedulerServiceStub(channel)
        self.can_share = True
        self._shared_calls: list[GenerateManyCall] = []
        self.num_calls = 0  # client methods in progress
        self.num_requests = 0  # client methods in progress that stream a request

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set() or self.loop.is_closed()

    def check_open(self) -> None:
        """Raise Cancelled if the connection is closed."""
        if self.is_closed:
            raise wire.closed()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the gRPC errors that are raised inside a `with` block into PagewireError.

        Closing the connection cancels its gRPC calls. A task that waits for such a call then gets a CancelledError,
        although the task itself was not cancelled. This CancelledError becomes the client's error Cancelled.
        """
        try:
            yield
        except grpc.RpcError as error:
            raise wire.decode_error(error, self._url) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed.is_set() or task is None or task.cancelling():
                raise
            raise wire.closed() from None

    def submit(self, request: pb.GenerateRequest, put: Put, timeout: float | None) -> Callable[[], None]:
        """Send a generation request on the shared gRPC call, which is opened if necessary. Return a function that
        aborts the request.

        A request larger than MAX_SHARED_BYTES gets a call of its own. Aborting a request that has ended does nothing.
        Raise Cancelled if the connection is closed.
        """
        self.check_open()
        is_alone = request.ByteSize() > MAX_SHARED_BYTES
        self._shared_calls = [call for call in self._shared_calls if not call.is_over]
        shared = next((call for call in self._shared_calls if not (is_alone or call.is_alone)), None)
        if shared is None:
            shared = GenerateManyCall(self.stub.GenerateMany(metadata=self.metadata), self._url, is_alone=is_alone)
            self._shared_calls.append(shared)
        return shared.submit(request, put, timeout)

    async def responses(
        self, request: pb.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Send a generation request on the shared gRPC call and yield the responses. Closing the generator aborts the
        request."""
        inbox: asyncio.Queue[pb.GenerateResponse | PagewireError | None] = asyncio.Queue()
        abort = self.submit(request, inbox.put_nowait, timeout)
        try:
            while (response := await inbox.get()) is not None:
                if isinstance(response, PagewireError):
                    raise response
                yield response
        finally:
            abort()

    @contextlib.asynccontextmanager
    async def read(self, method: str, request: object, timeout: float | None) -> AsyncGenerator[Any, None]:
        """Start a gRPC call of the streaming method `method`, and provide the call to the block of a `with` statement,
        which reads the responses. Leaving the block cancels the call."""
        with self.translated():
            call = getattr(self.stub, method)(request, timeout=timeout, metadata=self.metadata)
            try:
                yield call
            finally:
                call.cancel()

    async def wait(self, seconds: float) -> None:
        """Wait `seconds` before the next attempt of a failed request. Raise Cancelled if the connection is closed, even
        during the wait."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        self.check_open()

    async def close(self) -> None:
        """End all calls of this connection and close the gRPC channel."""
        if self._closed.is_set():
            return
        self._closed.set()
        for call in self._shared_calls:
            await call.close()
        await self.channel.close()
        self.release()

    def release(self) -> None:
        """Drop all references to the gRPC channel, so that the channel can be garbage collected. Before this call, the
        channel must be closed, or its event loop must have ended."""
        self.channel = self.stub = None
        self._shared_calls = []
        _open_connections.discard(self)


class Channels:
    """The gRPC connections of one client, one for each event loop that has used the client. A closed connection is
    opened again at its next use."""

    def __init__(self, url: str, **options: Unpack[ConnectionOptions]) -> None:
        """Check the connection options of a client, without opening a connection.

        Raise TypeError for an unknown option. Raise ValueError for a URL without a port, an invalid API key, or an
        invalid combination of TLS files.
        """
        refuse_unknown("a client", options, ConnectionOptions)
        self._url = url
        self._target = _target(url)
        self._credentials = _credentials(url, **options)
        api_key = options.get("api_key")
        # Metadata works without TLS too, unlike gRPC's own call credentials.
        self._metadata: Metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._connections: dict[asyncio.AbstractEventLoop, Connection] = {}

    @contextlib.contextmanager
    def connected(self, *, is_request: bool = False) -> Iterator[Connection]:
        """Provide the connection of the running event loop to a `with` block, for one call of the client. The
        connection is opened if necessary.

        The call is counted as in progress until the block ends.
        """
        connection = self._of_loop()
        connection.num_calls += 1
        connection.num_requests += is_request
        try:
            yield connection
        finally:
            connection.num_calls -= 1
            connection.num_requests -= is_request

    async def aclose(self) -> None:
        """Close the gRPC connection of the running event loop. Do nothing if the loop has none."""
        connection = self._connections.pop(asyncio.get_running_loop(), None)
        if connection is not None and not _is_inherited:
            await connection.close()

    def _of_loop(self) -> Connection:
        if _is_inherited:
            raise PagewireError(_FORKED, code=grpc.StatusCode.FAILED_PRECONDITION)
        loop = asyncio.get_running_loop()
        connection = self._connections.get(loop)
        if connection is None or connection.is_closed:
            with _forking:
                self._connections = {kept: each for kept, each in self._connections.items() if not each.is_closed}
                connection = self._connections[loop] = self._open()
        return connection

    def _open(self) -> Connection:
        global _has_opened
        is_proxied = http_proxy_of(self._target) is not None
        channel = open_channel(self._target, self._credentials, OPTIONS, uses_http_proxy=is_proxied)
        connection = Connection(channel, self._url, self._metadata)
        _open_connections.add(connection)
        _has_opened = True
        return connection


def _target(url: str) -> str:
    """Convert the URL of a server to a gRPC target. Raise ValueError for a URL without a valid port."""
    require("url", url, isinstance(url, str), "a text such as '127.0.0.1:50051'")
    check_text("url", url)
    target = re.sub("^grpcs?://", "", url).rstrip("/")
    if re.match("(dns|unix|unix-abstract|ipv4|ipv6|vsock|xds):", target):
        return target
    # gRPC would reduce a port above 65535 modulo 65536.
    parts = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:/\[\]\s]+):0*([1-9][0-9]{0,4})", target)
    if parts is None or int(parts[2]) > 65_535:
        raise ValueError(f"{url!r} is not a server's address: give HOST:PORT, such as 127.0.0.1:50051")
    return target


def _credentials(
    url: str,
    tls_ca: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    api_key: str | None = None,
) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials for a gRPC channel, or None for a plaintext connection.

    TLS is used if the URL starts with "grpcs://" or a TLS file is given. Raise ValueError for an invalid API key or for
    only one of `tls_cert` and `tls_key`.
    """
    for name, path in (("tls_ca", tls_ca), ("tls_cert", tls_cert), ("tls_key", tls_key)):
        require(name, path, isinstance(path, str | os.PathLike | None), "the path of a PEM file")
    if (tls_cert is None) != (tls_key is None):
        raise ValueError("tls_cert and tls_key go together: give both or neither")
    if api_key is not None and not (
        isinstance(api_key, str) and api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
    ):
        raise ValueError("api_key must be printable ASCII without spaces around it, and not empty")
    if not (url.startswith("grpcs://") or tls_ca or tls_cert):
        return None
    return TlsFiles(
        ca=NamedFile("tls_ca", tls_ca), cert=NamedFile("tls_cert", tls_cert), key=NamedFile("tls_key", tls_key)
    ).credentials.for_channel()


_open_connections: WeakSet[Connection] = WeakSet()
# Held while a channel is opened and while the process is forked.
_forking = threading.Lock()
# _inherits: whether a child forked now would inherit a gRPC without its threads. _is_inherited: whether this process is
# such a child.
_inherits = _is_inherited = False
_has_opened = False
# The names of gRPC's threads: the Python thread in which `grpc.aio` polls for events, and the threads of the gRPC core.
_POLLER, _CORE = "_poll_wrapper", ("event_engine", "grpc_", "lifeguard")
# How long to wait, in seconds, for these threads to end after the last channel was closed.
_THREADS_END_S = 1.0


async def _close_idle() -> None:
    """Close the gRPC connections of the background event loop that no call is using. This is done before the process
    forks."""
    loop = asyncio.get_running_loop()
    for connection in list(_open_connections):
        if connection.loop is loop and connection.num_calls == 0:
            await connection.close()


def _release_ended() -> None:
    for connection in list(_open_connections):
        if connection.loop.is_closed():
            connection.release()


def _before_fork() -> None:
    global _inherits
    try:
        _release_ended()
        background_loop.finish(_close_idle)
        if _has_opened and not _open_connections:
            seconds = _THREADS_END_S / 128
            while _has_grpc_threads() and seconds < _THREADS_END_S:
                gc.collect()  # leftovers of ended calls keep their channels alive
                _wait_for_sleep(seconds)
                seconds *= 2
    finally:
        _forking.acquire()
        _inherits = _has_grpc_threads()


def _wait_for_sleep(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _has_grpc_threads() and time.monotonic() < deadline:
        time.sleep(0.001)


def _has_grpc_threads() -> bool:
    """Return whether gRPC has running threads in this process. A child process forked now would lack these threads."""
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has just ended
            if task.read_text().startswith(_CORE):
                return True
    return any(_POLLER in thread.name for thread in threading.enumerate())


def _after_fork_in_child() -> None:
    global _is_inherited
    _is_inherited = _is_inherited or _inherits
    if _inherits:
        # gRPC crashes when the parent's calls and channels are destroyed in the child, even at exit. Extra references
        # keep them alive.
        for connection in list(_open_connections):
            for kept in (connection, *asyncio.all_tasks(connection.loop)):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_forking.release, after_in_child=_after_fork_in_child)
