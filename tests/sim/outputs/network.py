"""gRPC simulated in memory: channels and a server's port, with delays, bounded windows, cut connections and deadlines.

This module provides what the generated stubs require of a channel and the generated servicers of a server. It behaves
as `grpc.aio` does, as far as clients and servers can observe. Messages are passed as bytes, so that no side keeps a
reference to an object that the other side changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
import grpc.aio

from scheduler_service.api.authentication import Authenticator, ending

StatusCode = grpc.StatusCode
_LOST = "Socket closed"


@dataclass(frozen=True, slots=True)
class Status:
    code: Any
    details: str = ""
    trailing: tuple[tuple[str, bytes], ...] = ()


_RECONNECTED_AFTER = 5.0  # seconds, including backoff
_CANCELLED = Status(StatusCode.CANCELLED, "Locally cancelled by application!")


@dataclass(frozen=True, slots=True)
class Weather:
    """The behaviour of a network. Times are in seconds."""

    delay: float  # the longest delay of a message
    window: int  # the number of unread messages in one direction of a call at which a writer blocks
    notice: float  # the longest time until a server notices that its client has gone


class Pipe:
    """One direction of a call. Messages arrive in order; a broken pipe loses only a suffix of them."""

    def __init__(self, rng: Random, weather: Weather) -> None:
        self._rng = rng
        self._weather = weather
        self._arrived: deque[bytes | Status | None] = deque()  # None: the writer has half-closed
        self._under_way: deque[tuple[asyncio.TimerHandle, bytes | Status | None]] = deque()
        self._last_at = 0.0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_cut = False
        self.num_read = 0

    async def send(self, data: bytes) -> None:
        """Wait for room and send a message. The message is lost if the pipe is cut."""
        assert self._writer is None, "a call is written to by two at once"
        while len(self._arrived) + len(self._under_way) >= self._weather.window and not self._is_cut:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        self.put(data)

    def put(self, item: bytes | Status | None) -> None:
        """Send an item, whether or not there is room."""
        if not self._is_cut:
            loop = asyncio.get_running_loop()
            self._last_at = max(self._last_at, loop.time() + self._rng.random() * self._weather.delay)
            self._under_way.append((loop.call_at(self._last_at, self._arrive), item))

    async def read(self) -> bytes | Status | None:
        """Return the next item. The last item is not a message."""
        assert self._reader is None, "a call is read by two at once"
        while not self._arrived:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        _wake(self._writer)
        self.num_read += 1
        return self._arrived.popleft()

    def cut(self) -> None:
        """Lose some of the items in transit and all later items."""
        if not self._is_cut:
            self._is_cut = True
            num_kept = self._rng.randint(0, len(self._under_way))
            for number, (handle, item) in enumerate(self._under_way):
                handle.cancel()
                if number < num_kept:
                    self._arrived.append(item)
            self._under_way.clear()
            _wake(self._reader)
            _wake(self._writer)

    def end(self, item: Status | None) -> None:
        """Cut the pipe, and deliver `item` as the last item."""
        self.cut()
        self._arrived.append(item)
        _wake(self._reader)

    def _arrive(self) -> None:
        """Deliver the next item in order; timers with equal times may fire in any order."""
        _, item = self._under_way.popleft()
        self._arrived.append(item)
        _wake(self._reader)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Network:
    """The network between one client and one server, and its calls."""

    def __init__(self, port: Port, weather: Weather, name: str) -> None:
        self.port = port
        self.weather = weather
        self.rng = Random(name)
        self.calls: dict[Call, None] = {}  # calls that are open on either side, in order
        self.num_cuts = 0
        self.calm_from = 0.0  # from this time, clients that lost their calls have started new ones
        self.is_up = True

    def cut(self, seconds: float) -> None:
        """Break the connection, and refuse new connections for `seconds`."""
        if self.is_up:
            self.num_cuts += 1
            self.is_up = False
            self.calm_from = asyncio.get_running_loop().time() + seconds + _RECONNECTED_AFTER
            for call in list(self.calls):
                call.cut()
            asyncio.get_running_loop().call_later(seconds, self._connect)

    def _connect(self) -> None:
        self.is_up = True
        for call in list(self.calls):
            call.begin()


class Call:
    """An RPC of any kind, as its client sees it."""

    def __init__(
        self,
        network: Network,
        method: str,
        codec: tuple[Callable[[Any], bytes], Callable[[bytes], Any]],
        metadata: Sequence[tuple[str, str]],
        timeout: float | None,
        *,
        waits: bool,
    ) -> None:
        """`waits`: wait for a missing connection; otherwise the call fails at once."""
        loop = asyncio.get_running_loop()
        self._network = network
        self.method = method
        self.metadata = tuple(metadata)
        self.deadline = None if timeout is None else loop.time() + timeout
        self._serialize, self._parse = codec
        self._rng = rng = Random(network.rng.random())
        self.up, self.down = Pipe(rng, network.weather), Pipe(rng, network.weather)
        self.status: Status | None = None  # as the client knows it
        self._is_half_closed = False
        self._has_begun = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None
        self._timer = None if timeout is None else loop.call_later(timeout, self._expire)
        network.calls[self] = None
        if network.is_up:
            self.begin()
        elif not waits:
            self._end(Status(StatusCode.UNAVAILABLE, "failed to connect to all addresses"))

    @property
    def is_over(self) -> bool:
        """Whether the client knows how the call ended."""
        return self.status is not None

    # The client's side

    async def write(self, message: Any) -> None:
        await self._has_begun.wait()
        if self.is_over or self._is_half_closed:
            raise asyncio.InvalidStateError("RPC already finished.")
        try:
            await self.up.send(self._serialize(message))
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise()

    def send_only(self, message: Any) -> None:
        """Send the only request of a call."""
        self.up.put(self._serialize(message))
        self.half_close()

    def half_close(self) -> None:
        if not self._is_half_closed:
            self._is_half_closed = True
            self.up.put(None)

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """Return the next response, or EOF. Raises AioRpcError."""
        if not self.is_over:
            try:
                item = await self.down.read()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if isinstance(item, bytes) and not self.is_over:
                return self._parse(item)
            if isinstance(item, Status) and not self.is_over:
                self._end(item)
        self._raise()
        return grpc.aio.EOF

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the only response. Raises AioRpcError."""
        return self._response().__await__()

    async def _response(self) -> Any:
        response = await self.read()
        assert await self.read() is grpc.aio.EOF
        return response

    async def wait_for_connection(self) -> None:
        await self._has_begun.wait()
        self._raise()

    def cancel(self) -> bool:
        if self.status is not None:
            return False
        self._end(_CANCELLED)
        return True

    def _raise(self) -> None:
        """Raise the call's error if the call has failed or was cancelled."""
        if self.status is None:
            return
        if self.status is _CANCELLED:
            raise asyncio.CancelledError
        if self.status.code is not StatusCode.OK:
            trailing = grpc.aio.Metadata(*self.status.trailing)
            raise grpc.aio.AioRpcError(self.status.code, grpc.aio.Metadata(), trailing, self.status.details)

    def _end(self, status: Status) -> None:
        """End the call for the client, which reads no more.

        The server notices later, unless it sent the status itself.
        """
        self.status = status
        self._has_begun.set()
        if self._timer is not None:
            self._timer.cancel()
        self.down.end(status)
        self.up.cut()
        self._hang_up(self._network.weather.delay)
        self._forget()

    def _expire(self) -> None:
        if self.status is None:
            self._end(Status(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    # The network's side

    def begin(self) -> None:
        """Start to serve the call: a connection exists."""
        if self._serving is None and not self.is_over:
            self._has_begun.set()
            self._serving = asyncio.create_task(self._network.port.serve(self))
            self._serving.add_done_callback(lambda _: self._forget())

    def cut(self) -> None:
        """Lose the connection. Each side notices the loss separately."""
        if self._serving is not None:
            self.up.cut()
            self.down.cut()
            if self.status is None:
                lost = Status(StatusCode.UNAVAILABLE, "Socket closed")
                asyncio.get_running_loop().call_later(self._soon(self._network.weather.delay), self.down.end, lost)
            self._hang_up(self._network.weather.notice)

    def _hang_up(self, seconds: float) -> None:
        """Let the server notice later that its client has gone.

        The server may first see the end of the requests, and is cancelled after that.
        """
        serving = self._serving
        if serving is not None and not serving.done():
            loop, delays = asyncio.get_running_loop(), sorted((self._soon(seconds), self._soon(seconds)))
            loop.call_later(delays[0], self.up.end, None)
            loop.call_later(delays[1], serving.cancel)

    def _soon(self, seconds: float) -> float:
        return self._rng.random() * seconds

    def _forget(self) -> None:
        if self.status is not None and (self._serving is None or self._serving.done()):
            self._network.calls.pop(self, None)


class Channel:
    """A channel, with the methods that the generated stubs call."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def _callable(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        codec = (request_serializer, response_deserializer)

        def call(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str]] = (),
            wait_for_ready: bool = False,
        ) -> Call:
            made = Call(self._network, method, codec, metadata, timeout, waits=wait_for_ready)
            if request is not None:
                made.send_only(request)
            return made

        return call

    unary_unary = unary_stream = stream_stream = stream_unary = _callable

    async def close(self) -> None:
        for call in list(self._network.calls):
            call.cancel()


class Dialler:
    """The front end's source of channels."""

    is_outdated = False

    def __init__(self, network: Network) -> None:
        self._channel = Channel(network)

    async def channel(self) -> Channel:
        return self._channel


class Port:
    """A server, with the interface that generated servicers and calls use."""

    def __init__(self, authenticator: Authenticator, on_error: Callable[[BaseException], None]) -> None:
        self._authenticator = authenticator
        self._on_error = on_error
        self._handlers: dict[str, Any] = {}
        self._calls: dict[Call, None] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Ignore the generic handlers: the registered ones suffice."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self._handlers.update((f"/{service}/{name}", handler) for name, handler in handlers.items())

    async def serve(self, call: Call) -> None:
        """Serve one call in the same context managers as a real server."""
        handler, context = self._handlers[call.method], Context(call)
        context.serialize = handler.response_serializer
        self._calls[call] = None
        try:
            with ending(context):
                await self._authenticator.enter(call.method, context)
                await self._respond(handler, call, context)
        except asyncio.CancelledError:
            return
        except BaseException as error:
            self._on_error(error)
            context.set_code(StatusCode.UNKNOWN)
        finally:
            del self._calls[call]
        call.down.put(Status(context.code() or StatusCode.OK, context.details(), context.trailing))

    def stop(self) -> None:
        """End all calls."""
        for call in list(self._calls):
            call.cut()

    async def _respond(self, handler: Any, call: Call, context: Context) -> None:
        requests = _requests(call, handler.request_deserializer)
        if handler.request_streaming:
            await handler.stream_stream(requests, context)
            return
        request = await anext(requests, None)
        if request is None:
            raise asyncio.CancelledError  # the request was lost
        if handler.response_streaming:
            await handler.unary_stream(request, context)
        else:
            await context.write(await handler.unary_unary(request, context))


async def _requests(call: Call, parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    while isinstance(data := await call.up.read(), bytes):
        yield parse(data)


class Context:
    """A call, as its server sees it."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._code: Any = None
        self._details = ""
        self.trailing: tuple[tuple[str, bytes], ...] = ()
        self.serialize: Callable[[Any], bytes] = bytes

    async def write(self, message: Any) -> None:
        await self._call.down.send(self.serialize(message))

    async def send_initial_metadata(self, metadata: object) -> None:
        """Ignore the metadata, which no client reads."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._call.metadata

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())

    def set_trailing_metadata(self, trailing: tuple[tuple[str, bytes], ...]) -> None:
        self.trailing = trailing

    def set_details(self, details: str) -> None:
        self._details = details

    def set_code(self, code: Any) -> None:
        self._code = code

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details
