"""The part of the public service that a scheduler and its front ends serve alike: requests, and the tokenizer; and
the service of a front end, where all else is the scheduler's.

Checks come before the first message. A client that goes away takes its request with it, unless that is detached. A
RefusedError ends its call (`api/authentication.py`).
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
from scheduler_service.serving.prompt_text import ANY_NUMBER, TextLimits
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
_PIECE_TOKENS = 16_384  # that are put into a message before others have their turn
_MAX_PENDING_CALLS = 4096  # of those of a front end whose text becomes tokens
# By front ends, beside streams and what they may know themselves.
_PASSED_ON = ("Submit", "GetResult", "KeepRecord", "DeleteResult", "GetRequest")
# Passes a call of a method on to the scheduler, and yields what it answers, one message or several.
Forward = Callable[[str, Message, Call], AsyncGenerator[Any, None]]


class RequestServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        intake: Intake,
        authenticator: Authenticator,
        server_info: Callable[[], scheduler_pb2.GetServerInfoResponse],
        loads: Callable[[Call], scheduler_pb2.GetLoadsResponse] | None = None,
    ) -> None:
        """`intake` is there for other services of the same server too: its limits hold for all of them together.
        Without `loads` calls of GenerateMany are not told any."""
        self.intake = intake
        self._authenticator = authenticator
        self._make_shared_call = lambda call: SharedCall(intake, call, server_info, loads)
        self._shared_calls: dict[SharedCall, None] = {}
        self._is_closed = False

    @property
    def num_unread_failures(self) -> int:
        """Failed submissions that clients of GenerateMany have not been told of. May be asked from any thread."""
        return sum(call.num_unread_failures for call in tuple(self._shared_calls))

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    def announce(self) -> None:
        """Tell calls of GenerateMany that the server's state has changed."""
        for call in self._shared_calls:
            call.announce()

    def close(self) -> None:
        """Let calls of GenerateMany end with their last request."""
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
        """Make tokens of texts."""
        texts = self.intake.texts
        if texts is None:
            raise _no_tokenizer("texts")
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
        """Make texts of tokens."""
        texts = self.intake.texts
        if texts is None:
            raise _no_tokenizer("prompts")
        tenant = self._authenticator.call(context).caller.tenant("")
        skip_special_tokens = value_or(request, "skip_special_tokens", True)
        response = scheduler_pb2.DetokenizeResponse()
        for index, prompt in enumerate(request.prompts):
            highest, vocab_size = max(prompt.ids, default=0), self.intake.model.vocab_size
            if highest >= vocab_size:
                raise invalid(
                    f"prompts[{index}].ids", f"token id {highest} is not below the vocabulary's size, {vocab_size}"
                )
            response.texts.append(await texts.decode(list(prompt.ids), tenant, skip_special_tokens=skip_special_tokens))
        return response

    def _tenant(self, request: Any, context: grpc.aio.ServicerContext) -> str:
        """Return the tenant of a request that has a field for one. Raises RefusedError."""
        return self._authenticator.call(context).caller.tenant(request.tenant)


class FrontEndServicer(RequestServicer):
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
        """`server_info` has what the scheduler told of itself last. `forward` passes calls on to it, and `address` is
        its own, for messages."""
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
            if method not in vars(FrontEndServicer) | vars(RequestServicer):  # the scheduler alone serves it
                serve = self._answer if method in _PASSED_ON else self._refuse
                setattr(self, method, partial(serve, method))

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        """Return what the scheduler told of itself last."""
        info = self._server_info()
        if not info.version:
            raise RefusedError(Reason.UNAVAILABLE, info.unavailable_reason)
        return info

    async def Attach(self, request: scheduler_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> None:
        await write_all(self._passed_on("Attach", request, context), context)

    async def _abort_elsewhere(self, tenant: str, request_id: str, call: Call) -> None:
        await answer_of(self._forward("Abort", scheduler_pb2.AbortRequest(request_id=request_id, tenant=tenant), call))

    async def _answer(self, method: str, request: Message, context: grpc.aio.ServicerContext) -> Any:
        return await answer_of(self._passed_on(method, request, context))

    def _passed_on(self, method: str, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        """Yield what the scheduler answers to a call about a request, which is of the caller's tenant."""
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
    """Return the one message that a call which was passed on is answered by. Raises RefusedError."""
    [answer] = [message async for message in messages]
    return answer


def _no_tokenizer(field: str) -> RefusedError:
    return invalid(field, "the served checkpoint has no tokenizer; send prompts as token ids")
