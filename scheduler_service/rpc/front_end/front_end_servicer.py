"""The public service of a front end: what makes and reads text happens here, everything else at the scheduler."""

from functools import partial
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import Message

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.entrance import Entrance
from scheduler_service.rpc.front_end.scheduler_link import SchedulerLink
from scheduler_service.rpc.public.request_servicer import RequestServicer
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.model_info import ModelInfo
from scheduler_service.serving.prompt_text import TextLimits
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tokenizer import Tokenizer

_MAX_PENDING_CALLS = 4096  # of those whose text becomes tokens


class FrontEndServicer(RequestServicer):
    def __init__(
        self,
        link: SchedulerLink,
        entrance: Entrance,
        address: str,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        *,
        text_limits: TextLimits,
    ) -> None:
        """`address` is the scheduler's, for messages."""
        intake = Intake(link, model, tokenizer, max_pending_calls=_MAX_PENDING_CALLS, text_limits=text_limits)
        super().__init__(intake, entrance, link.server_info)
        self._link = link
        self._address = address
        for method in scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name:
            if method not in vars(FrontEndServicer) | vars(RequestServicer):  # the scheduler alone serves it
                setattr(self, method, partial(self._refuse, method))

    async def GetServerInfo(
        self, request: scheduler_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.GetServerInfoResponse:
        """Return what the scheduler told of itself last."""
        info = self._link.server_info()
        if not info.version:
            raise RefusedError(Reason.UNAVAILABLE, self._link.unavailable_reason)
        return info

    async def _refuse(self, method: str, request: Message, context: grpc.aio.ServicerContext) -> NoReturn:
        raise RefusedError(
            Reason.UNIMPLEMENTED,
            f"a front end does not serve {method}; call the scheduler itself, at {self._address}",
        )

    def _unknown(self, request_id: str) -> RefusedError:
        return RefusedError(
            Reason.NOT_FOUND,
            f"no request {request_id!r} of this tenant runs through this front end",
            "request_id",
        )
