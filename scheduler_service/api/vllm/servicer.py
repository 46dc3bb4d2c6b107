"""`vllm.grpc.engine.VllmEngine`, the protocol by which routers balance requests over several schedulers.

A request is handled as in SchedulerService, with other messages. The protocol is published on PyPI as smg-grpc-proto.

A request belongs to the caller's tenant, or to no tenant if the server has none. Output tokens are detokenized only to
find stop texts, because routers detokenize themselves. A front end also serves this protocol, except the calls for the
prefix cache.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from typing import NoReturn

import grpc
import grpc.aio
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.authentication import Authenticator
from scheduler_service.api.grpc.generate_response import decode_embedding, send_headers_if_silent, write_all
from scheduler_service.api.vllm.generate_request import read_generate_request
from scheduler_service.api.vllm.generate_response import ResponseTranslator
from scheduler_service.api.vllm.kv_events import KvEventFeed
from scheduler_service.api.vllm.report import Load, model_info, scheduler_load, server_info
from scheduler_service.api.vllm.tokenizer_archive import archive_chunks, read_tokenizer_archive
from scheduler_service.core.cache import content_root
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import parse_request
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.step_loop import StepLoop

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
_TENANT = ""  # the messages have no field for a tenant
_MAX_FLUSH_WAIT = 600.0  # seconds
# Paths of SchedulerService's fields in VllmEngine's requests.
_FIELDS = {"sampling.": "sampling_params.", "token_ids.ids": "tokenized.input_ids"}
# The HTTP APIs of routers have other names for some fields. An error message that names such a field explains it, since
# its reader sent an HTTP request.
_HTTP_NAMES = {
    "sampling_params.max_tokens": "max_completion_tokens, max_output_tokens and max_new_tokens are max_tokens here",
    "sampling_params.min_tokens": "min_new_tokens is min_tokens here",
    "sampling_params.json_schema": "response_format, text.format, and a tool_choice that forces a call are json_schema "
    "here",
    "sampling_params.json_object": "response_format is json_object here",
    "sampling_params.grammar": "ebnf is grammar here",
}


class VllmServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The implementation of the gRPC service VllmEngine, in a scheduler or a front end. Routers use this service to
    distribute requests over several servers."""

    def __init__(
        self,
        intake: Intake,
        authenticator: Authenticator,
        info: Callable[[], scheduler_pb2.GetServerInfoResponse],
        read_load: Callable[[], Awaitable[Load]],
        cache: tuple[StepLoop, Callable[[], Load]] | None,
    ) -> None:
        """Create the VllmEngine service of a scheduler or a front end. `intake` admits the requests of all APIs of this
        server. `info` returns the same answer as the RPC GetServerInfo of SchedulerService. `read_load` returns the
        scheduler's load, or raises RefusedError.

        `cache` is None in a front end. In a scheduler it is a tuple: the step loop, through which the prefix cache is
        accessed, and a function that returns the load to send with cache events.
        """
        self._intake = intake
        self._authenticator = authenticator
        self._availability = intake.engine.availability
        self._info = info
        self._read_load = read_load
        self._cache = cache
        self._archive: asyncio.Task[bytes] | None = None
        self._started_at = time.monotonic()
        self._last_request_at = 0.0  # seconds since 1970
        self._first_event_number = time.time_ns() // 1000

    def add_to(self, server: grpc.aio.Server) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self, server)

    # Requests

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        self._last_request_at = time.time()
        try:
            await self._generate(request, context)
        except RefusedError as error:
            raise _with_vllm_fields(error) from None

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.AbortResponse:
        """Abort running requests by their ids, and return an empty response.

        Ignore ids of unknown or ended requests: a router cannot know whether a request has just ended.
        """
        call = self._authenticator.call(context)
        tenant = call.caller.tenant(_TENANT)
        for request_id in request.request_ids:
            with contextlib.suppress(RefusedError):
                await self._intake.abort(tenant, request_id, call)
        return vllm_engine_pb2.AbortResponse()

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.EmbedResponse:
        """Compute the embedding of a prompt and return it. The prompt must be given as token ids; its text is
        ignored."""
        self._last_request_at = time.time()
        token_ids, request_id = tuple(request.tokenized.input_ids), request.request_id or None
        call = self._authenticator.call(context)
        try:
            parsed = parse_request(token_ids, None, call, self._intake.model, request_id=request_id)
            _, end = await self._intake.embed(parsed, call)
        except RefusedError as error:
            raise _with_vllm_fields(error) from None
        embedding = decode_embedding(end.embedding)
        return vllm_engine_pb2.EmbedResponse(
            embedding=embedding,
            prompt_tokens=end.num_prompt_tokens,
            embedding_dim=len(embedding),
        )

    # The server and its model

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Report whether the server accepts requests. Before the first worker has connected, the RPC fails with
        UNAVAILABLE. A router then repeats the check, and does not list the model until a check succeeds."""
        if self._availability.is_serving:
            return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="serving")
        reason = self._availability.refusal()
        if self._availability.capacity is None:
            loading = (
                f"loading: {self._availability.missing_reason or 'no worker has joined yet'}; "
                f"{time.monotonic() - self._started_at:.0f} s since the start"
            )
            raise RefusedError(Reason.UNAVAILABLE, f"{reason} ({loading})" if reason else loading)
        return vllm_engine_pb2.HealthCheckResponse(
            healthy=False,
            message=reason or "the worker fails repeatedly before its first token; see the server's log",
        )

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        return model_info(self._intake.model, self._info().served_model_name, self._availability.max_sequence_tokens)

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Return a description of the server. The number of active requests and the time of the last request are
        included only for operators."""
        info = server_info(self._availability.capacity, self._info().max_num_seqs)
        if self._authenticator.call(context).caller.is_operator():
            load = await self._read_load()
            info.active_requests = load.stats.num_running + load.num_waiting
            info.last_receive_timestamp = self._last_request_at
        info.uptime_seconds = time.monotonic() - self._started_at
        return info

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext
    ) -> vllm_engine_pb2.GetLoadsResponse:
        self._authenticator.call(context).caller.check_operator("the load")
        if request.dp_rank != 0:
            raise invalid("dp_rank", f"dp_rank is {request.dp_rank}, but must be 0, the only rank")
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._info().version,
            dp_rank_count=1,
            loads=[scheduler_load(await self._read_load())],
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[common_pb2.GetTokenizerChunk, None]:
        for chunk in archive_chunks(await self._tokenizer_archive()):
            yield chunk

    # The prefix cache

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if self._cache is None:
            raise RefusedError(
                Reason.UNIMPLEMENTED, "a front end has no cache events; subscribe at the scheduler itself"
            )
        cache, load = self._cache
        # The router considers the subscription established when the headers arrive.
        await context.send_initial_metadata(())
        caller = self._authenticator.call(context).caller
        read_load = load if caller.is_operator() else None
        root = content_root(caller.tenant(_TENANT), "", self._intake.model.digest)
        feed = KvEventFeed(cache.kv_events, self._first_event_number, read_load, root.digest)
        await write_all(feed.batches(request), context)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common_pb2.FlushCacheResponse:
        if self._cache is None:
            raise RefusedError(Reason.UNIMPLEMENTED, "a front end has no cache to flush; call the scheduler itself")
        self._authenticator.call(context).caller.check_operator("the prefix cache")
        if not 0 <= request.timeout_s <= _MAX_FLUSH_WAIT:
            raise invalid("timeout_s", f"timeout_s is {request.timeout_s:g}, but must be 0 to {_MAX_FLUSH_WAIT:g}")
        cache, read_load = self._cache
        if await cache.flush_cache(request.timeout_s):
            return common_pb2.FlushCacheResponse(success=True, message="the prefix cache is empty")
        load = read_load()
        return common_pb2.FlushCacheResponse(
            success=False,
            message=f"{load.stats.num_running} sequences run and {load.num_waiting} wait; try again, or with a longer "
            "timeout_s",
        )

    # The profiler

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        raise RefusedError(
            Reason.UNIMPLEMENTED, "this server has no profiler to start; see `pagewire bench latency --profile`"
        )

    async def StopProfile(self, request: common_pb2.StopProfileRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        raise RefusedError(Reason.UNIMPLEMENTED, "this server has no profiler to stop")

    async def _generate(self, message: vllm_engine_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        call = self._authenticator.call(context)
        parsed = read_generate_request(message, call, self._intake.model)
        active = await self._intake.begin(
            parsed,
            call,
            OutputMode.STREAMED if message.stream else OutputMode.WHOLE,
            with_text=bool(parsed.stop),
        )
        translator = ResponseTranslator(message, active.request)
        try:
            if message.stream:
                await send_headers_if_silent(active, context)
            else:
                await active.wait_for_end()
            async with contextlib.aclosing(active.deltas()) as deltas:
                async for delta in deltas:
                    for translation in translator.translate(delta):
                        await context.write(translation)
        finally:
            active.cancel()

    async def _tokenizer_archive(self) -> bytes:
        """Return a zip archive of the tokenizer's files. The first call builds the archive on a thread, and later calls
        use the same archive. Raise RefusedError if the checkpoint has no tokenizer or a file cannot be read."""
        if self._intake.model.tokenizer_path is None:
            raise RefusedError(
                Reason.FAILED_PRECONDITION, "the served checkpoint has no tokenizer.json; send token ids"
            )
        if self._archive is None:
            self._archive = asyncio.create_task(asyncio.to_thread(read_tokenizer_archive, self._intake.model))
            # If all callers are gone, the exception must still be retrieved, or asyncio logs an error.
            self._archive.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(self._archive)
        except (OSError, ValueError) as error:
            self._archive = None
            raise RefusedError(Reason.UNAVAILABLE, f"the tokenizer's files cannot be read: {error}") from error


def _with_vllm_fields(error: RefusedError) -> RefusedError:
    for ours, theirs in _FIELDS.items():
        if error.field.startswith(ours):
            field = theirs + error.field.removeprefix(ours)
            names = f" ({_HTTP_NAMES[field]})" if field in _HTTP_NAMES else ""
            return RefusedError(error.reason, f"{error}{names}", field)
    return error
