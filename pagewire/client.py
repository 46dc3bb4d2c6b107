"""The client of a scheduler: one class, asynchronous inside `async with`, synchronous inside `with`."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pagewire import wire
from pagewire.attachment import Attachment
from pagewire.authorized_channel import AuthorizedChannel
from pagewire.completion import Completion, CompletionBuilder, Output, Result
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from pagewire.sampling import SamplingParams
from pagewire.server import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.shared_stream import NotShared, SharedStream

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A long prefill sends no data for a while; pings go on.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
UNARY_TIMEOUT_S = 10.0
# Before the second, third ... attempt to connect in a row; the last goes on.
RECONNECT_DELAYS_S = (0.1, 0.2, 0.5, 1.0, 2.0)
# Requests in flight, the new one included, from which on new ones share a call: fewer messages, for the server and for
# this process. A message that a request has to itself costs as much as a message for all.
MIN_SHARED = 2
LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\]):")


class Client:
    """A connection to a scheduler.

    `url` is "host:port", "grpc://host:port", "grpcs://host:port" (TLS) or a gRPC target such as "dns:///name:port".
    TLS is used with "grpcs://" or any of the PEM files `tls_ca` (who signs the server; default: the system's),
    `tls_cert` and `tls_key` (this client, for mutual TLS). `api_key` says whose requests these are, where the server
    has tenants; without TLS others can read it. ValueError for a url, a key or a set of files that cannot be.

    Asynchronous, inside `async with`: `generate`, `acomplete`, `submit`, `attach`, `result`, `abort`, `get_request`,
    `blocks`, `server_info`, `loads`.
    Synchronous, inside `with`: `complete`, `stream`. Requests of `generate` and `acomplete` that begin while others are
    in flight share a call: same results, same errors. The client may be used by any number of tasks or threads.
    Calls fail with a `PagewireError`. A lost worker is no error: the stream goes on where it was.
    """

    def __init__(
        self,
        url: str,
        *,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
        ):
            raise ValueError("api_key must be printable ASCII without spaces around it, and not empty")
        self.url = url
        self._api_key = api_key
        self._target = _target(url)
        self._credentials: grpc.ChannelCredentials | None = None
        if url.startswith("grpcs://") or tls_ca or tls_cert:
            self._credentials = grpc.ssl_channel_credentials(_read(tls_ca), _read(tls_key), _read(tls_cert))
        self._channel: Any = None
        self._async_channel: Any = None
        self._shared: SharedStream | None = None  # None too if the server knows no such thing
        self._num_in_flight = 0

    async def __aenter__(self) -> "Client":
        self._async_channel = self._open(grpc.aio.insecure_channel, grpc.aio.secure_channel)
        self._shared = SharedStream(pb_grpc.SchedulerServiceStub(self._async_channel).GenerateMany, self.url)
        return self

    async def __aexit__(self, *exception: object) -> None:
        channel, self._async_channel = self._async_channel, None
        shared, self._shared = self._shared, None
        if shared is not None:
            await shared.close()
        await channel.close()

    def __enter__(self) -> "Client":
        self._channel = self._open(grpc.insecure_channel, grpc.secure_channel)
        return self

    def __exit__(self, *exception: object) -> None:
        channel, self._channel = self._channel, None
        channel.close()

    async def generate(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - sent as the deadline of the call, so that the server knows it
        cache_salt: str = "",
        tenant: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of 1 to n samples of a prompt as they come.

        Give either `prompt` or `prompt_token_ids`. `sampling` None leaves every parameter to the server. A lower
        `priority` runs first. `timeout` in seconds covers the whole request, time in the queue included. Closing the
        generator or cancelling its task aborts the request; leave the loop early inside `contextlib.aclosing`, so
        that this happens at once.
        """
        request = wire.encode_request(
            prompt,
            sampling,
            prompt_token_ids=prompt_token_ids,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        builder = CompletionBuilder(_num_samples(sampling), time.monotonic())
        async with contextlib.aclosing(self._responses(request, timeout)) as responses:
            async for response in responses:
                output = wire.decode_output(response)
                builder.add(output, time.monotonic())
                yield output
        builder.finish(time.monotonic())

    async def acomplete(
        self, prompt: str | None = None, sampling: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The whole of a request, with the same arguments as `generate`."""
        builder = CompletionBuilder(_num_samples(sampling), time.monotonic())
        async with contextlib.aclosing(self.generate(prompt, sampling, **options)) as outputs:
            async for output in outputs:
                builder.add(output, time.monotonic())
        return builder.finish(time.monotonic())

    def stream(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
    ) -> Generator[Output, None, None]:
        """The synchronous twin of `generate`. Closing the generator aborts the request."""
        request = wire.encode_request(
            prompt,
            sampling,
            prompt_token_ids=prompt_token_ids,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        builder = CompletionBuilder(_num_samples(sampling), time.monotonic())
        call = self._stub().Generate(request, timeout=timeout)
        try:
            for response in call:
                output = wire.decode_output(response)
                builder.add(output, time.monotonic())
                yield output
            builder.finish(time.monotonic())
        except grpc.RpcError as error:
            raise wire.decode_error(error, self.url) from None
        finally:
            call.cancel()

    def complete(self, prompt: str | None = None, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole of a request, with the same arguments as `stream`."""
        builder = CompletionBuilder(_num_samples(sampling), time.monotonic())
        for output in self.stream(prompt, sampling, **options):
            builder.add(output, time.monotonic())
        return builder.finish(time.monotonic())

    async def submit(
        self,
        prompt: str | None = None,
        sampling: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> str:
        """Queues a detached request and returns its id: it runs whatever becomes of this client.

        The arguments are those of `generate`.
        """
        request = wire.encode_request(
            prompt,
            sampling,
            prompt_token_ids=prompt_token_ids,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
        )
        # No timeout: until its first worker is there, a server that has just started lets requests wait.
        response = await self._call(self._async_stub().Submit, pb.SubmitRequest(request=request), timeout=None)
        return response.request_id

    async def attach(
        self, request_id: str, *, tenant: str = "", from_token: int = 0, max_reconnects: int = 5
    ) -> AsyncGenerator[Output, None]:
        """Yields the deltas of a detached request as `generate` does, of every sample from `from_token` on.

        If the connection breaks, it is made again and the deltas go on with the next token; Unavailable after
        `max_reconnects` attempts in a row that brought nothing. Closing the generator leaves the request alone.
        NotFound for an unknown id, OutOfRange for a token beyond those there are; a request that failed ends with its
        error.
        """
        attachment = Attachment(from_token)
        num_failures = 0
        while True:
            call = self._async_stub().Attach(
                pb.AttachRequest(
                    request_id=request_id,
                    tenant=tenant,
                    from_token=from_token,
                    from_tokens=attachment.reconnect(),
                )
            )
            try:
                async for response in call:
                    num_failures = 0
                    output = attachment.take(wire.decode_output(response))
                    if output is not None:
                        yield output
                attachment.finish()
                return
            except grpc.RpcError as error:
                failure = wire.decode_error(error, self.url)
                # What comes with a retry delay is the server's own word, not a broken connection.
                is_broken = failure.code is grpc.StatusCode.UNAVAILABLE and failure.retry_delay is None
                if not is_broken or num_failures == max_reconnects:
                    raise failure from None
            finally:
                call.cancel()
            await asyncio.sleep(RECONNECT_DELAYS_S[min(num_failures, len(RECONNECT_DELAYS_S) - 1)])
            num_failures += 1

    async def result(self, request_id: str, *, tenant: str = "") -> Result:
        """The state of a detached request and all of its output so far. NotFound for an unknown id."""
        request = pb.GetResultRequest(request_id=request_id, tenant=tenant)
        return wire.decode_result(await self._call(self._async_stub().GetResult, request))

    async def get_request(self, request_id: str, *, tenant: str = "") -> RequestReport:
        """What an unfinished request is doing and why it waits. NotFound if none of this id runs."""
        request = pb.GetRequestRequest(request_id=request_id, tenant=tenant)
        return wire.decode_report(await self._call(self._async_stub().GetRequest, request))

    async def blocks(self) -> BlockMap:
        """What every block of the KV cache is used for."""
        return wire.decode_block_map(await self._call(self._async_stub().GetBlocks, pb.GetBlocksRequest()))

    async def abort(self, request_id: str, *, tenant: str = "") -> None:
        """Ends a running request of the tenant; its stream ends with finish_reason "abort". NotFound if none runs."""
        await self._call(self._async_stub().Abort, pb.AbortRequest(request_id=request_id, tenant=tenant))

    async def server_info(self) -> ServerInfo:
        """What is served, and its limits."""
        return wire.decode_server_info(await self._call(self._async_stub().GetServerInfo, pb.GetServerInfoRequest()))

    async def loads(self) -> Loads:
        """What the server is doing now."""
        return wire.decode_loads(await self._call(self._async_stub().GetLoads, pb.GetLoadsRequest()))

    async def _responses(
        self,
        request: pb.GenerateRequest,
        timeout: float | None,  # noqa: ASYNC109 - sent to the server too
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Of one request, on a call of its own, or with others in flight on the one that they share."""
        stub = self._async_stub()
        self._num_in_flight += 1
        try:
            if self._shared is not None and self._num_in_flight >= MIN_SHARED:
                try:
                    async with contextlib.aclosing(self._shared.responses(request, timeout)) as responses:
                        async for response in responses:
                            yield response
                    return
                except NotShared:
                    self._shared = None
            call = stub.Generate(request, timeout=timeout)
            try:
                async for response in call:
                    yield response
            except grpc.RpcError as error:
                raise wire.decode_error(error, self.url) from None
            finally:
                call.cancel()
        finally:
            self._num_in_flight -= 1

    async def _call(self, method: Any, request: Any, timeout: float | None = UNARY_TIMEOUT_S) -> Any:  # noqa: ASYNC109
        try:
            return await method(request, timeout=timeout)
        except grpc.RpcError as error:
            raise wire.decode_error(error, self.url) from None

    def _open(self, insecure_channel: Any, secure_channel: Any) -> Any:
        options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0 if LOOPBACK.match(self._target) else 1)]
        if self._credentials is None:
            channel = insecure_channel(self._target, options=options)
        else:
            channel = secure_channel(self._target, self._credentials, options=options)
        return channel if self._api_key is None else AuthorizedChannel(channel, self._api_key)

    def _async_stub(self) -> pb_grpc.SchedulerServiceStub:
        if self._async_channel is None:
            raise RuntimeError("open the client with `async with` for everything but complete and stream")
        return pb_grpc.SchedulerServiceStub(self._async_channel)

    def _stub(self) -> pb_grpc.SchedulerServiceStub:
        if self._channel is None:
            raise RuntimeError("open the client with `with` for complete and stream")
        return pb_grpc.SchedulerServiceStub(self._channel)


def _num_samples(sampling: SamplingParams | None) -> int:
    return 1 if sampling is None or sampling.n is None else sampling.n


def _read(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _target(url: str) -> str:
    """The gRPC target of a url. Raises ValueError for one without a port."""
    target = re.sub("^grpcs?://", "", url).rstrip("/")
    if re.match("(dns|unix|unix-abstract|ipv4|ipv6|vsock|xds):", target):
        return target
    if not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:/\[\]]+):[0-9]+", target):
        raise ValueError(f"{url!r} is not a server's address: give HOST:PORT, such as 127.0.0.1:50051")
    return target
