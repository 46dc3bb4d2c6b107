"""The public service of a front end: what makes and reads text happens here, everything else at the scheduler."""

from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import grpc.aio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service.rpc.front_end.scheduler_link import SchedulerLink
from scheduler_service.rpc.public.generation import generate
from scheduler_service.rpc.public.intake import Intake
from scheduler_service.rpc.public.prompt_text import TextLimits
from scheduler_service.rpc.public.shared_call import SharedCalls
from scheduler_service.rpc.public.tokenization import Tokenization
from scheduler_service.rpc.status import RpcError, abort
from scheduler_service.rpc.tenants.authentication import tenant_of_call
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.tokenizer import Tokenizer


class FrontEndServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self,
        link: SchedulerLink,
        address: str,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        max_pending_calls: int,
        text_limits: TextLimits,
    ) -> None:
        """`address` is the scheduler's, for messages."""
        self._link = link
        self._address = address
        self.intake = Intake(
            link,
            # Deltas are delivered one by one, outlet or not.
            lambda request, deliver, fail, outlet, label: link.submit(request, deliver, fail),
            model,
            tokenizer,
            max_pending_calls=max_pending_calls,
            text_limits=text_limits,
            is_taken=lambda tenant, request_id: False,  # the scheduler knows
        )
        self._tokenization = Tokenization(tokenizer, self.intake.texts, model)
        self._shared_calls = SharedCalls(self.intake, link, link.server_info, None)

    def add_to(self, server: grpc.aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, server)

    def announce(self) -> None:
        """The scheduler's state has changed: tell those that share a call."""
        self._shared_calls.announce()

    def close(self) -> None:
        """Let calls of GenerateMany end with their last request."""
        self._shared_calls.close()

    async def Generate(self, request: scheduler_pb2.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            await generate(request, context, self.intake, self._link)
        except RpcError as error:
            await abort(context, error)

    async def GenerateMany(
        self, requests: AsyncIterator[scheduler_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> None:
        try:
            await self._shared_calls.serve(requests, context)
        except RpcError as error:
            await abort(context, error)

    async def Abort(
        self, request: scheduler_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.AbortResponse:
        try:
            self._link.abort(tenant_of_call(request.tenant), request.request_id)
        except RpcError as error:
            await abort(context, error)
        except KeyError:
            message = f"no request {request.request_id!r} of this tenant runs through this front end"
            await abort(context, RpcError(grpc.StatusCode.NOT_FOUND, message, "request_id"))
        return scheduler_pb2.AbortResponse()

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        """The scheduler's, as it told it last."""
        info = self._link.server_info()
        if not info.version:
            await abort(context, RpcError(grpc.StatusCode.UNAVAILABLE, self._link.unavailable_reason))
        return info

    async def Tokenize(
        self, request: scheduler_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.TokenizeResponse:
        try:
            return await self._tokenization.tokenize(request)
        except RpcError as error:
            await abort(context, error)

    async def Detokenize(
        self, request: scheduler_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.DetokenizeResponse:
        try:
            return await self._tokenization.detokenize(request)
        except RpcError as error:
            await abort(context, error)

    # What only the scheduler serves

    async def Submit(self, request: scheduler_pb2.SubmitRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("Submit", context)

    async def Attach(self, request: scheduler_pb2.AttachRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("Attach", context)

    async def GetResult(self, request: scheduler_pb2.GetResultRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("GetResult", context)

    async def GetRequest(self, request: scheduler_pb2.GetRequestRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("GetRequest", context)

    async def GetBlocks(self, request: scheduler_pb2.GetBlocksRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("GetBlocks", context)

    async def GetLoads(self, request: scheduler_pb2.GetLoadsRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        await self._refuse("GetLoads", context)

    async def SubscribeKvEvents(
        self, request: scheduler_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> NoReturn:
        await self._refuse("SubscribeKvEvents", context)

    async def _refuse(self, method: str, context: grpc.aio.ServicerContext) -> NoReturn:
        message = f"a front end does not serve {method}; call the scheduler itself, at {self._address}"
        await abort(context, RpcError(grpc.StatusCode.UNIMPLEMENTED, message))
