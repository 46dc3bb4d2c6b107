"""Translation of the messages between scheduler and worker to and from `pagewire.worker.v1`."""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from pagewire.common.wire.messages import (
    GrammarReport,
    Heartbeat,
    Hello,
    Refusal,
    StepPlan,
    StepResult,
    StepResults,
    WorkerCapacity,
    WorkerProtocolError,
    WorkerStarting,
    illegal_values,
)
from pagewire.common.wire.transport.translation import decoder, encoder, unknown_field
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2

FromScheduler = Hello | StepPlan
Response = WorkerStarting | WorkerCapacity | Refusal | StepResult | StepResults | Heartbeat | GrammarReport
Data = TypeVar("Data")
Envelope = TypeVar("Envelope", bound=Message)


class _Translation(Generic[Data, Envelope]):
    """A translation between dataclasses and the protobuf messages on the link between scheduler and worker, in both
    directions. Each protobuf message is an envelope, whose body is a message of one of several types. A body's type has
    the same name as its dataclass.
    """

    def __init__(self, kinds: tuple[type, ...], envelope: type[Envelope]) -> None:
        self._envelope = envelope
        self._encoders: dict[type, tuple[str, Callable[[Any], Message]]] = {}
        self._decoders: dict[str, Callable[[Message], Data]] = {}
        by_name = {kind.__name__: kind for kind in kinds}
        for body in envelope.DESCRIPTOR.fields:
            kind, message_type = by_name[body.message_type.name], GetMessageClass(body.message_type)
            self._encoders[kind] = body.name, encoder(kind, message_type)
            self._decoders[body.name] = decoder(kind, message_type)

    def encode(self, data: Data) -> Envelope:
        body, encode = self._encoders[type(data)]
        return self._envelope(**{body: encode(data)})

    def decode(self, message: Envelope) -> Data:
        """Convert a received protobuf envelope to the dataclass of its body. Raises WorkerProtocolError for an unknown
        field, an invalid value, or a missing body.
        """
        if reason := unknown_field(message):
            raise WorkerProtocolError(reason)
        body = message.WhichOneof("body")
        if body is None:
            raise WorkerProtocolError(f"{message.DESCRIPTOR.full_name} has no body")
        try:
            return self._decoders[body](getattr(message, body))
        except ValueError as error:
            raise WorkerProtocolError(f"the message {body} is invalid: {error}") from None


_requests: _Translation[FromScheduler, worker_pb2.ExecuteRequest] = _Translation(
    get_args(FromScheduler), worker_pb2.ExecuteRequest
)
_responses: _Translation[Response, worker_pb2.ExecuteResponse] = _Translation(
    get_args(Response), worker_pb2.ExecuteResponse
)
encode_request, decode_request, encode_response = _requests.encode, _requests.decode, _responses.encode


def decode_response(message: worker_pb2.ExecuteResponse) -> Response:
    """Convert a protobuf message from a worker to its dataclass. Raises WorkerProtocolError if the message has invalid
    values.
    """
    response = _responses.decode(message)
    if not isinstance(response, WorkerCapacity):
        return response
    for name, value in illegal_values(response):
        raise WorkerProtocolError(f"the worker reports an invalid {name}: {value}")
    if response.num_host_blocks and not 0 < response.swap_bandwidth < math.inf:
        raise WorkerProtocolError(f"the worker reports host blocks, but the swap_bandwidth {response.swap_bandwidth}")
    return response
