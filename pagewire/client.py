"""The client of a scheduler: one class, asynchronous inside `async with`, synchronous inside `with`."""

import re
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from pagewire import wire
from pagewire.completion import Completion, CompletionBuilder, Output
from pagewire.sampling import SamplingParams
from pagewire.server import Loads, ServerInfo
from protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A long prefill sends no data for a while; pings go on.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
UNARY_TIMEOUT_S = 10.0
LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\]):")


class Client:
    """A connection to a scheduler.

    `url` is "host:port", "grpc://host:port", "grpcs://host:port" (TLS) or a gRPC target such as "dns:///name:port".
    TLS is used with "grpcs://" or any of the PEM files `tls_ca` (who signs the server; default: the system's),
    `tls_cert` and `tls_key` (this client, for mutual TLS). ValueError for a url or a set of files that cannot be.

    Asynchronous, inside `async with`: `generate`, `acomplete`, `abort`, `server_info`, `loads`.
    Synchronous, inside `with`: `complete`, `stream`. The client may be used by any number of tasks or threads.
    Calls fail with a `PagewireError`. A lost worker is no error: the stream goes on where it was.
    """

    def __init__(
        self, url: str, *, tls_ca: str | None = None, tls_cert: str | None = None, tls_key: str | None = None
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        self.url = url
        self._target = _target(url)
        self._credentials: grpc.ChannelCredentials | None = None
        if url.startswith("grpcs://") or tls_ca or tls_cert:
            self._credentials = grpc.ssl_channel_credentials(_read(tls_ca), _read(tls_key), _read(tls_cert))
        self._channel: Any = None
        self._async_channel: Any = None

    async def __aenter__(self) -> "Client":
        self._async_channel = self._open(grpc.aio.insecure_channel, grpc.aio.secure_channel)
        return self

    async def __aexit__(self, *exception: object) -> None:
        channel, self._async_channel = self._async_channel, None
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
        call = self._async_stub().Generate(request, timeout=timeout)
        try:
            async for response in call:
                output = wire.decode_output(response)
                builder.add(output, time.monotonic())
                yield output
            builder.finish(time.monotonic())
        except grpc.RpcError as error:
            raise wire.decode_error(error, self.url) from None
        finally:
            call.cancel()

    async def acomplete(
        self, prompt: str | None = None, sampling: SamplingParams | None = None, **options: Any
    ) -> Completion:
        """The whole of a request, with the same arguments as `generate`."""
        builder = CompletionBuilder(_num_samples(sampling), time.monotonic())
        async for output in self.generate(prompt, sampling, **options):
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

    async def abort(self, request_id: str, *, tenant: str = "") -> None:
        """Ends a running request of the tenant; its stream ends with finish_reason "abort". NotFound if none runs."""
        await self._call(self._async_stub().Abort, pb.AbortRequest(request_id=request_id, tenant=tenant))

    async def server_info(self) -> ServerInfo:
        """What is served, and its limits."""
        return wire.decode_server_info(await self._call(self._async_stub().GetServerInfo, pb.GetServerInfoRequest()))

    async def loads(self) -> Loads:
        """What the server is doing now."""
        return wire.decode_loads(await self._call(self._async_stub().GetLoads, pb.GetLoadsRequest()))

    async def _call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=UNARY_TIMEOUT_S)
        except grpc.RpcError as error:
            raise wire.decode_error(error, self.url) from None

    def _open(self, insecure_channel: Any, secure_channel: Any) -> Any:
        options = [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0 if LOOPBACK.match(self._target) else 1)]
        if self._credentials is None:
            return insecure_channel(self._target, options=options)
        return secure_channel(self._target, self._credentials, options=options)

    def _async_stub(self) -> pb_grpc.SchedulerServiceStub:
        if self._async_channel is None:
            raise RuntimeError(
                "open the client with `async with` for generate, acomplete, abort, server_info and loads"
            )
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
