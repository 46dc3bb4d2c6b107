"""Stored responses and background responses. The scheduler stores each response as a record under the id of its
request, so every front end can answer for every id. Only front ends can decode the records."""

import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from pagewire.common.strict_json import MAX_VALUES, count_values
from pagewire.common.wire.transport.message_size import MAX_MESSAGE_BYTES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc.generate_response import decode_delta
from scheduler_service.api.grpc.request_servicer import Forward, answer_of
from scheduler_service.api.http.answering import send_events
from scheduler_service.api.http.answers import encode
from scheduler_service.api.http.chat_completions import parser_maker
from scheduler_service.api.http.detached_requests import encoded_request
from scheduler_service.api.http.request_options import DecodedCall
from scheduler_service.api.http.responses.answers import DeletedResponse, InputItemList, ResponseAnswer
from scheduler_service.api.http.responses.called_tools import called_tools, found_tools
from scheduler_service.api.http.responses.conversation import to_chat_request
from scheduler_service.api.http.responses.requests import InputItem, InputItemsQuery, ResponseQuery, ResponsesRequest
from scheduler_service.api.http.responses.response_teller import ID_PREFIX, ResponseEvents
from scheduler_service.api.http.tool_calls import ParserMaker
from scheduler_service.api.http.transport.event_stream import EventStream
from scheduler_service.serving.intake import Intake
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.caller import Call

logger = logging.getLogger(__name__)

_RECORD_BYTES = MAX_MESSAGE_BYTES - 1024  # leaves room for the other fields of the gRPC message
_PAGE_ITEMS = 20
_ITEM_PLACE = re.compile(r"(_input)?_\d+$")  # the end of an item's id, after the request id
_MAX_NAMED = 1024  # responses that the item references of one request may name
PROMPT_END_CHARS = 256
_Result = TypeVar("_Result")
_decode_items = msgspec.json.Decoder(list[InputItem]).decode


class ResponseRecord(Struct, frozen=True):
    """The data that the scheduler stores for a response of the Responses API."""

    input: list[InputItem]  # the whole conversation, including items before the request's input
    response: ResponseAnswer  # its final state; for a background response, its first state
    request: ResponsesRequest | None = None  # set for background responses: how to parse the output; without its input
    prompt_end: str = ""  # determines whether the output begins with reasoning

    def encoded(self) -> bytes:
        """Return the JSON of the record, which the scheduler stores. Raises RefusedError if the record has too many
        bytes or too many JSON values."""
        record = encode(self)
        if len(record) > _RECORD_BYTES:
            advice = "store: false" if self.request is None else "store: false without background"
            raise invalid(
                "store",
                f"the response and its conversation have {len(record)} bytes; at most {_RECORD_BYTES} can be stored; "
                f"shorten it, or send {advice}",
            )
        if (number := count_values(record)) > MAX_VALUES:
            raise invalid(
                "store",
                f"the response and its conversation have {number} values; at most {MAX_VALUES} can be stored; shorten "
                "it, or send store: false",
            )
        return record


_decode_record = msgspec.json.Decoder(ResponseRecord).decode


class StoredResponses:
    """Access to the stored responses of one tenant, for one HTTP call. The scheduler stores the responses."""

    def __init__(self, tenant: str | None, call: Call, intake: Intake, forward: Forward) -> None:
        """Create the access to the stored responses of a tenant. `forward` sends RPCs to the scheduler. Raises
        RefusedError if the caller may not use `tenant`."""
        self.tenant = call.caller.tenant(tenant or "")
        self._call = call
        self._intake = intake
        self._forward = forward

    async def keep(self, record: ResponseRecord) -> ResponseAnswer:
        """Store a finished response in the scheduler, and return the response. If the response cannot be stored, log a
        warning and return the response with its field `store` set to false. The client then still gets the generated
        output."""
        named = {"request_id": record.response.id.removeprefix(ID_PREFIX), "tenant": self.tenant}
        try:
            encoded = await self.in_turn(self._call.size, record.encoded)
            message = scheduler_pb2.KeepRecordRequest(record=encoded, **named)
            await answer_of(self._forward("KeepRecord", message, self._call))
        except RefusedError as refusal:
            logger.warning("the response of request %r was returned, but not stored: %s", named["request_id"], refusal)
            return msgspec.structs.replace(record.response, store=False)
        return record.response

    async def begin(
        self, request: ResponsesRequest, record: ResponseRecord, asked: DecodedCall, stream: EventStream
    ) -> bytes | None:
        """Submit a background response, which is generated even if the client disconnects. Return the JSON of the
        response without output. If `request.stream` is set, send the events of the response as a stream and return
        None. Raises RefusedError if the request is invalid or refused."""
        record = msgspec.structs.replace(record, request=msgspec.structs.replace(request, input=""))
        with asked.names.translate_refusals():
            encoded = await self.in_turn(self._call.size, record.encoded)
            message = await encoded_request(asked.requests[0], self._intake, encoded)
            await answer_of(self._forward("Submit", message, self._call))
        if not request.stream:
            return encode(record.response)
        await self._tell(record, stream)
        return None

    async def conversation(self, response_id: str) -> tuple[list[InputItem], int]:
        """Return the conversation that a request with this `previous_response_id` continues, and the size of the stored
        record in bytes. The conversation ends with the output of the stored response. Raises RefusedError if the
        response is unknown or has not completed."""
        record, result = await self._find(response_id, "previous_response_id")
        response = await self._response(record, result)
        if response.status not in ("completed", "incomplete"):
            raise invalid(
                "previous_response_id",
                f"the response {response_id!r} is {response.status}; wait until it is completed, or name another",
            )
        items = await self.in_turn(len(result.record), lambda: _decode_items(encode(response.output)))
        return [*record.input, *items], len(result.record)

    async def items(self, ids: set[str]) -> dict[str, bytes]:
        """Find conversation items by their ids. The items are inputs or outputs of stored responses. Return the JSON of
        each item, keyed by its id. Raises RefusedError if an item is unknown, or if the ids belong to more than 1024
        responses."""
        names = {_ITEM_PLACE.sub("", each.partition("_")[2]) for each in ids}
        if len(names) > _MAX_NAMED:
            raise invalid(
                "input",
                f"input refers to items of {len(names)} responses, at most {_MAX_NAMED} are allowed; send the items",
            )
        found: dict[str, bytes] = {}
        for name in names:
            with contextlib.suppress(RefusedError):  # the response is unknown
                items, _ = await self.conversation(f"{ID_PREFIX}{name}")
                found |= {item.id: encode(item) for item in items if item.id in ids}
        for item_id in ids - found.keys():
            raise invalid("input", f"no item {item_id[:80]!r} is known for this tenant; send the item itself")
        return found

    async def read(self, response_id: str) -> bytes:
        """Return the JSON of a stored or background response in its current state. Raises RefusedError if the response
        is unknown."""
        return encode(await self._response(*await self._find(response_id)))

    async def show(self, query: ResponseQuery, stream: EventStream) -> bytes | None:
        """Return the JSON of a stored response in its current state. If `query.stream` is set, send all events of the
        response instead, from the first, and return None. Raises RefusedError if the response is unknown. Raises
        RefusedError also if `query.stream` is set and the response was not generated in the background."""
        if not query.stream:
            return await self.read(query.response_id)
        record, _ = await self._find(query.response_id)
        if record.request is None:
            raise invalid("stream", "stream is true, but the response was not made in background; leave stream unset")
        await self._tell(record, stream)
        return None

    async def cancel(self, response_id: str) -> bytes:
        """Abort a background response, wait until it has ended, and return its JSON. Raises RefusedError if the
        response is unknown or is not a background response."""
        record, result = await self._find(response_id)
        if record.request is None:
            raise invalid(
                "response_id",
                f"the response {response_id!r} has ended, as it was not made in background; read it with GET",
            )
        if result.state == scheduler_pb2.RESULT_STATE_RUNNING:
            named = {"request_id": result.request_id, "tenant": self.tenant}
            with contextlib.suppress(RefusedError):  # it may have ended; the result below shows its state
                await self._intake.abort(**named, call=self._call)
            with contextlib.suppress(RefusedError):
                async with contextlib.aclosing(self._attach(record)) as deltas:
                    async for _ in deltas:
                        pass
        return await self.read(response_id)

    async def delete(self, response_id: str) -> bytes:
        """Delete a stored response. If it is still being generated, abort it. Return the JSON that confirms the
        deletion. Raises RefusedError if the response is unknown."""
        await self._find(response_id)
        await self._ask("DeleteResult", scheduler_pb2.DeleteResultRequest, response_id, "response_id")
        return encode(DeletedResponse(response_id))

    async def input_items(self, query: InputItemsQuery) -> bytes:
        """Return the JSON of one page of a response's input items. `query` contains the order, the page size, and the
        id of the item that precedes the page. Raises RefusedError if the response or that item is unknown."""
        record, _ = await self._find(query.response_id)
        items = record.input if query.order == "asc" else record.input[::-1]
        ids = [item.id for item in items]
        if query.after is not None:
            if query.after not in ids:
                raise invalid(
                    "after", f"after is {query.after[:80]!r}, which is no item of this response; send the id of one"
                )
            items = items[ids.index(query.after) + 1 :]
        page = items[: query.limit or _PAGE_ITEMS]
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        return encode(InputItemList(page, first, last, len(page) < len(items)))

    async def _find(self, response_id: str, field: str = "response_id") -> tuple[ResponseRecord, Any]:
        (
            """Load a stored response from the scheduler.

        Return the response's record, and the scheduler's message with the state and output of the request that
        generates the response. Errors name `field`, the request field that contained the id. Raises RefusedError if
        the response is unknown.
        """
            ""
        )
        result = await self._ask("GetResult", scheduler_pb2.GetResultRequest, response_id, field)
        with contextlib.suppress(msgspec.MsgspecError):  # a record of another kind
            record = await self.in_turn(len(result.record), _decode_record, result.record)
            if record.request is None or len(result.outputs) == 1:
                return record, result
        raise _unknown(response_id, field)

    async def _ask(self, method: str, kind: Any, response_id: str, field: str) -> Any:
        """Send an RPC about a response to the scheduler, and return the scheduler's answer. Raises RefusedError if the
        tenant has no response with this id. The error is the same if another tenant has such a response, so it reveals
        nothing about other tenants."""
        prefix, request_id = response_id[: len(ID_PREFIX)], response_id[len(ID_PREFIX) :]
        if prefix != ID_PREFIX:
            raise _unknown(response_id, field)
        try:
            return await answer_of(self._forward(method, kind(request_id=request_id, tenant=self.tenant), self._call))
        except RefusedError as refusal:
            raise _unknown(response_id, field) if refusal.reason is Reason.NOT_FOUND else refusal from None

    async def _response(self, record: ResponseRecord, result: Any) -> ResponseAnswer:
        if record.request is None:
            return record.response
        [output] = result.outputs
        if result.state == scheduler_pb2.RESULT_STATE_RUNNING:
            return msgspec.structs.replace(record.response, status="in_progress" if output.token_ids else "queued")
        event_writer = self._event_writer(record)
        events = await event_writer.events_for(decode_delta(output))
        if result.state == scheduler_pb2.RESULT_STATE_FAILED:
            events += event_writer.fail(result.failure.message)
        response = events[-1].response
        assert response is not None, "the last event contains the response"
        return response

    async def _tell(self, record: ResponseRecord, stream: EventStream) -> None:
        event_writer = self._event_writer(record)
        await send_events(event_writer.begin(), stream)
        try:
            async with contextlib.aclosing(self._attach(record)) as deltas:
                async for delta in deltas:
                    await send_events(await event_writer.events_for(decode_delta(delta)), stream)
        except RefusedError:
            _, result = await self._find(record.response.id)
            if result.state != scheduler_pb2.RESULT_STATE_FAILED:
                raise  # the events cannot be read, but the request still runs
            await send_events(event_writer.fail(result.failure.message), stream)
        await stream.end()

    def _attach(self, record: ResponseRecord) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        message = scheduler_pb2.AttachRequest(request_id=record.response.id.removeprefix(ID_PREFIX), tenant=self.tenant)
        return self._forward("Attach", message, self._call)

    def event_writer(
        self, make_parser: ParserMaker, record: ResponseRecord, request: ResponsesRequest
    ) -> ResponseEvents:
        """Create a converter from generated output to the events of a response. `make_parser` creates the output
        parser. `record` contains the response without output."""
        tools = called_tools(request.tools or (), found_tools(record.input))
        return ResponseEvents(make_parser(), record.response, tools, self._intake, self.tenant)

    def _event_writer(self, record: ResponseRecord) -> ResponseEvents:
        assert record.request is not None, "only background responses are converted again"
        chat = to_chat_request(record.request, record.input)
        return self.event_writer(parser_maker(chat, record.prompt_end, self._intake), record, record.request)

    async def in_turn(self, size: int, work: Callable[..., _Result], *args: Any) -> _Result:
        """Call `work` and return its result. `size` is the cost of the work in bytes or JSON values. If it is large,
        run `work` on a thread, which the tenants use in turn (see `Turns.run_in_turn`). Raises RefusedError if too much
        work is waiting."""
        return await self._intake.turns.run_in_turn(self.tenant, size, work, *args)


def _unknown(response_id: str, field: str) -> RefusedError:
    return RefusedError(
        Reason.NOT_FOUND if field == "response_id" else Reason.FAILED_PRECONDITION,
        f"no response {response_id!r} is known for this tenant; responses are stored only for a limited time",
        field,
    )
