"""The part of SchedulerService that a scheduler and a front end share, and the service of a front end.

The shared part handles requests and the tokenizer. A front end forwards some of the other calls to the scheduler and
refuses the rest.

A request is checked before the first message is sent. If the client disconnects, its request is cancelled, unless the
request is detached. A RefusedError ends its call (`api/authentication.py`).
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from pagewire.common.chat.chat_output import ChatRules
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.api.authentication import Authenticator
from scheduler_service.api.grpc.generate_request import read_request, value_or
from scheduler_service.api.grpc.generate_response import (
    decode_embedding,
    send_headers_if_silent,
    usage_of,
    write_all,
    write_deltas,
)
from scheduler_service.api.grpc.resolved_request import submitted
from scheduler_service.api.grpc.shared_call import SharedCall
from scheduler_service.serving.active_request import RequestEngine
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.parsed_request import check_token_id
from scheduler_service.serving.prompt_text import ANY_NUMBER, PromptTexts, TextLimits
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
_PIECE_TOKENS = 16_384  # added to a message before other tasks can run
_MAX_PENDING_CALLS = 4096  # a front end's limit of calls whose text waits for tokenization
# Unary calls that a front end forwards to the scheduler.
_FORWARDED = ("Submit", "GetResult", "KeepRecord", "DeleteResult", "GetRequest")
# Forwards a call of a method to the scheduler, and yields the one or more messages of its answer.
Forward = Callable[[str, Message, Call], AsyncGenerator[Any, None]]


class RequestServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The RPCs of the gRPC service SchedulerService that a scheduler and a front end handle in the same way."""

    def __init__(
        self,
        intake: Intake,
        authenticator: Authenticator,
        server_info: Callable[[], scheduler_pb2.GetServerInfoResponse],
        loads: Callable[[Call], scheduler_pb2.GetLoadsResponse] | None = None,
    ) -> None:
        """Create the RPCs that a scheduler and a front end have in common. `intake` admits the requests of all APIs of
        the server, so that its limits apply to all of them together.

        `server_info` returns the current answer of GetServerInfo. `loads` returns the server's load. Without `loads`,
        the command `get_loads` of a GenerateMany RPC is refused.
        """
        self.intake = intake
        self._authenticator = authenticator
        self._make_shared_call = lambda call: SharedCall(intake, call, server_info, loads)
        self._shared_calls: dict[SharedCall, None] = {}
        self._is_closed = False

    @property
    def num_unread_failures(self) -> int:
        """The number of failed requests in GenerateMany RPCs whose error has not been sent yet, because the clients
        read too slowly. It can be read from any thread."""
        return sum(call.num_unread_failures for call in tuple(self._shared_calls))

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    def announce(self) -> None:
        """Send the server's new state to the clients of all GenerateMany RPCs. The server calls this when its state has
        changed."""
        for call in self._shared_calls:
            call.announce()

    def close(self) -> None:
        """Refuse new requests in all GenerateMany RPCs, and end each RPC as soon as its last request has ended."""
        self._is_closed = True
        for call in self._shared_calls:
            call.close()

    async def Generate(self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        call = self._authenticator.call(context)
        active = await self.intake.begin(read_request(request, call, self.intake.model), call)
        try:
            await send_headers_if_silent(active, context)
            await write_deltas(active, context)
        finally:
            active.cancel()

    async def GenerateMany(
        self, requests: AsyncIterator[scheduler_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        call = self._make_shared_call(self._authenticator.call(context))
        self._shared_calls[call] = None
        try:
            if self._is_closed:
                call.close()
            await call.serve(requests, context)
        finally:
            del self._shared_calls[call]

    async def Embed(
        self, request: scheduler_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.EmbedResponse:
        call = self._authenticator.call(context)
        request_id, end = await self.intake.embed(read_request(request, call, self.intake.model), call)
        embedding = decode_embedding(end.embedding)
        return scheduler_pb2.EmbedResponse(request_id=request_id, embedding=embedding, usage=usage_of(end))

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        call = self._authenticator.call(context)
        await self.intake.abort(call.caller.tenant(request.tenant), request.request_id, call)
        return scheduler_pb2.AbortResponse()

    async def Tokenize(
        self, request: scheduler_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.TokenizeResponse:
        """Return the token ids of each text in the request."""
        texts = _texts_of(self.intake, "texts")
        tenant = self._authenticator.call(context).caller.tenant("")
        add_special_tokens = value_or(request, "add_special_tokens", True)
        response = scheduler_pb2.TokenizeResponse()
        for index, text in enumerate(request.texts):
            token_ids = await texts.encode(
                text, tenant, ANY_NUMBER, field=f"texts[{index}]", add_special_tokens=add_special_tokens
            )
            ids = response.prompts.add().ids
            for start in range(0, len(token_ids), _PIECE_TOKENS):
                ids.extend(token_ids[start : start + _PIECE_TOKENS])
                await asyncio.sleep(0)
        return response

    async def Detokenize(
        self, request: scheduler_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DetokenizeResponse:
        """Return the text of each list of token ids in the request."""
        texts = _texts_of(self.intake, "prompts")
        tenant = self._authenticator.call(context).caller.tenant("")
        skip_special_tokens = value_or(request, "skip_special_tokens", True)
        response = scheduler_pb2.DetokenizeResponse()
        for index, prompt in enumerate(request.prompts):
            if (highest := max(prompt.ids, default=0)) >= self.intake.model.vocab_size:
                check_token_id(f"prompts[{index}].ids[{list(prompt.ids).index(highest)}]", highest, self.intake.model)
            response.texts.append(await texts.decode(list(prompt.ids), tenant, skip_special_tokens=skip_special_tokens))
        return response

    def _tenant(self, request: Any, context: grpc.aio.ServicerContext) -> str:
        """Return the tenant to which a message with a `tenant` field applies. Raise RefusedError if the caller may not
        act for this tenant."""
        return self._authenticator.call(context).caller.tenant(request.tenant)


class FrontEndServicer(RequestServicer):
    """The gRPC service SchedulerService of a front end. It sends requests to the scheduler over the front end's link.
    It forwards some other RPCs to the scheduler, and refuses the rest."""

    def __init__(
        self,
        engine: RequestEngine,
        server_info: Callable[[], scheduler_pb2.GetServerInfoResponse],
        forward: Forward,
        authenticator: Authenticator,
        address: str,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        text_limits: TextLimits,
        chats: ChatRules,
    ) -> None:
        """Create the gRPC service of a front end. `server_info` returns the scheduler's latest report about itself.
        `forward` forwards an RPC to the scheduler. `address` is the scheduler's network address, for error messages."""
        intake = Intake(
            engine,
            model,
            tokenizer,
            max_pending_calls=_MAX_PENDING_CALLS,
            text_limits=text_limits,
            abort_elsewhere=self._abort_elsewhere,
            chats=chats,
        )
        super().__init__(intake, authenticator, server_info)
        self._server_info = server_info
        self._forward = forward
        self._address = address
        for method in scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name:
            if method not in vars(FrontEndServicer) | vars(RequestServicer):  # only the scheduler implements it
                serve = self._answer if method in _FORWARDED else self._refuse
                setattr(self, method, partial(serve, method))

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        """Return the scheduler's latest report about itself. Raise RefusedError if the scheduler has not reported
        yet."""
        info = self._server_info()
        if not info.version:
            raise RefusedError(Reason.UNAVAILABLE, info.unavailable_reason)
        return info

    async def Attach(self, request: scheduler_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        await write_all(self._forward_call("Attach", request, context), context)

    async def _abort_elsewhere(self, tenant: str, request_id: str, call: Call) -> None:
        await answer_of(self._forward("Abort", scheduler_pb2.AbortRequest(request_id=request_id, tenant=tenant), call))

    async def _answer(self, method: str, request: Message, context: grpc.aio.ServicerContext) -> Any:
        return await answer_of(self._forward_call(method, request, context))

    def _forward_call(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        """Forward an RPC to the scheduler, on behalf of the caller's tenant, and yield the messages of the scheduler's
        answer."""
        call = self._authenticator.call(context)
        named = submitted(request) if isinstance(request, scheduler_pb2.SubmitRequest) else request
        named.tenant = call.caller.tenant(named.tenant)
        return self._forward(method, request, call)

    async def _refuse(self, method: str, request: Message, context: grpc.aio.ServicerContext) -> NoReturn:
        raise RefusedError(
            Reason.UNIMPLEMENTED,
            f"a front end does not serve {method}; call the scheduler itself, at {self._address}",
        )


async def answer_of(messages: AsyncGenerator[Any, None]) -> Any:
    """Wait for the only message of a forwarded unary RPC and return it. Raise RefusedError if the RPC fails."""
    [answer] = [message async for message in messages]
    return answer


def _texts_of(intake: Intake, field: str) -> PromptTexts:
    if intake.texts is None:
        raise invalid(field, "the served checkpoint has no tokenizer; send prompts as token ids")
    return intake.texts
