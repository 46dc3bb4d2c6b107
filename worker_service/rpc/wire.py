"""Between `pagewire.worker.v1` and `step.py`. Pure translation: values are checked by whoever uses them."""

from collections.abc import Callable

from pagewire.common.transport.translation import decoder, encoder, unknown_field
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2 as pb
from worker_service.step import (
    GrammarReport,
    Heartbeat,
    Hello,
    ProtocolError,
    Refusal,
    StepPlan,
    StepResult,
    WorkerCapacity,
)

Response = WorkerCapacity | Refusal | StepResult | Heartbeat | GrammarReport

# By the name of the body that a message may have, and by the type of what is answered.
_DECODERS: dict[str, Callable[..., Hello | StepPlan]] = {
    "plan": decoder(StepPlan, pb.StepPlan),
    "hello": decoder(Hello, pb.Hello),
}
_ENCODERS = {
    StepResult: ("result", encoder(StepResult, pb.StepResult)),
    Heartbeat: ("heartbeat", encoder(Heartbeat, pb.Heartbeat)),
    WorkerCapacity: ("ready", encoder(WorkerCapacity, pb.WorkerCapacity)),
    Refusal: ("refusal", encoder(Refusal, pb.Refusal)),
    GrammarReport: ("grammar", encoder(GrammarReport, pb.GrammarReport)),
}


def decode_request(request: pb.ExecuteRequest) -> Hello | StepPlan:
    """Raises ProtocolError for a field or a value that this version does not know, or no body at all."""
    if reason := unknown_field(request):
        raise ProtocolError(reason)
    body = request.WhichOneof("body")
    if body is None:
        raise ProtocolError("a request has no body")
    try:
        return _DECODERS[body](getattr(request, body))
    except ValueError as error:
        raise ProtocolError(f"a {body} means nothing: {error}") from None


def encode_response(response: Response) -> pb.ExecuteResponse:
    body, encode = _ENCODERS[type(response)]
    return pb.ExecuteResponse(**{body: encode(response)})
