"""Translates the client's data to and from `pagewire.scheduler.v1`. It is pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

import grpc

from pagewire.completion import Output, Result, TokenLogprobs
from pagewire.conversation import Session
from pagewire.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FieldViolation,
    InternalError,
    InvalidRequest,
    NotFound,
    OutOfRange,
    PagewireError,
    ResourceExhausted,
    Unavailable,
)
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.sampling import BOOLEAN_FIELDS, INTEGER_FIELDS, REAL_FIELDS, Default, SamplingParams, is_integer
from pagewire.server import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.structured_outputs import StructuredOutputs
from pagewire.transport.translation import decoder, enum_names

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a machine with a grpcio of its own may lack googleapis-common-protos: errors then have no details
    error_details_pb2 = status_pb2 = None

FINISH_REASONS = {pb.FINISH_REASON_UNSPECIFIED: None} | enum_names(pb.FinishReason.DESCRIPTOR)
EARLY_STOPPING = {name: number for number, name in enum_names(pb.EarlyStopping.DESCRIPTOR).items()} | {
    False: pb.EARLY_STOPPING_HEURISTIC,
    True: pb.EARLY_STOPPING_FIRST,
}
RESULT_STATES = enum_names(pb.ResultState.DESCRIPTOR)
REQUEST_STATES = {number: name.replace("_", " ") for number, name in enum_names(pb.RequestState.DESCRIPTOR).items()}
TIMEOUT_PASSED = "the timeout passed before the request was done; raise it or ask for fewer tokens"
STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
ERRORS: dict[grpc.StatusCode, type[PagewireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: InternalError,
}


def encode_request(
    prompt: object,
    sampling: object,
    *,
    prompt_token_ids: object,
    request_id: str | None,
    priority: int,
    cache_salt: str,
    tenant: str,
    session: object = None,
) -> pb.GenerateRequest:
    """Makes the message of a request. Raises InvalidRequest for a number that the wire cannot hold, and TypeError
    unless there is exactly one prompt."""
    if (prompt is None) == (prompt_token_ids is None):
        raise TypeError("give either prompt or prompt_token_ids")
    if prompt is not None and not isinstance(prompt, str):
        kind = "a text; token ids go into prompt_token_ids, and only complete, acomplete, chat and achat take lists"
        raise TypeError(f"prompt must be {kind}; got {prompt!r:.80}")
    if prompt_token_ids is not None and not are_token_ids(prompt_token_ids):
        raise TypeError(f"prompt_token_ids must be a list of integers, of one prompt; got {prompt_token_ids!r:.80}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, such as SamplingParams(max_tokens=4); got {sampling!r:.80}")
    if session is not None and not isinstance(session, Session):
        raise TypeError(f"session must be a Session, such as Session('chat-7'); got {session!r:.80}")
    request = pb.GenerateRequest(tenant=tenant, cache_salt=cache_salt)
    if request_id is not None:
        request.request_id = request_id
    _assign("priority", partial(setattr, request, "priority", priority))
    if prompt_token_ids is not None:
        request.token_ids.SetInParent()
        _assign("token_ids.ids", lambda: request.token_ids.ids.extend(prompt_token_ids))
    if prompt is not None:
        request.text = prompt
    if sampling is not None:
        _encode_sampling(sampling, request.sampling)
    if session is not None:
        _encode_session(session, request)
    return request


def num_samples(request: pb.GenerateRequest) -> int:
    """Returns how many samples a request asks for; where it does not say, the server makes one."""
    return max(1, request.sampling.n)


def split_prompt(prompt: object, index: int) -> tuple[str | None, Sequence[int] | None]:
    """Returns the text or the token ids of the prompt at a place of a list. Raises TypeError."""
    if isinstance(prompt, str):
        return prompt, None
    if are_token_ids(prompt):
        return None, prompt
    hint = "; the token ids of one prompt go into prompt_token_ids" if is_integer(prompt) else ""
    raise TypeError(f"prompt {index} of the list is {prompt!r:.80}, but must be a text or token ids{hint}")


def as_prompts(token_ids: Iterable[Any]) -> tuple[list[Sequence[int]], bool]:
    """Returns lists of token ids, and whether there was only one that was not in a list. Raises TypeError."""
    given = list(token_ids)
    if all(map(is_integer, given)):
        return [given], True
    if not all(map(are_token_ids, given)):
        raise TypeError("token_ids must be a list of integers, or a list of such lists")
    return given, False


def encode_detokenize(prompts: Iterable[Sequence[int]], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Makes the message of lists of token ids. Raises InvalidRequest for an id that the wire cannot hold."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    for prompt in prompts:
        _assign("prompts.ids", partial(request.prompts.add().ids.extend, prompt))
    return request


def decode_prompts(response: pb.TokenizeResponse) -> list[list[int]]:
    return [list(prompt.ids) for prompt in response.prompts]


def are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    return not isinstance(value, str | bytes) and isinstance(value, Iterable) and all(map(is_integer, value))


def _encode_session(session: Session, request: pb.GenerateRequest) -> None:
    request.session_id = session.id
    if session.will_return is not None:
        request.will_return = session.will_return
    if session.retention_seconds is not None:
        _assign("retention_seconds", partial(setattr, request, "retention_seconds", session.retention_seconds))


def _encode_sampling(sampling: SamplingParams, message: pb.SamplingParams) -> None:
    message.SetInParent()
    for name in (*INTEGER_FIELDS, *REAL_FIELDS, *BOOLEAN_FIELDS):
        value = getattr(sampling, name)
        if name == "top_k" and value == -1:
            value = 0
        if sampling.beam_width is not None and isinstance(value, Default):
            value = None
        if value is not None:
            _assign(f"sampling.{name}", partial(setattr, message, name, value))
    if sampling.early_stopping is not None:
        message.early_stopping = EARLY_STOPPING[sampling.early_stopping]
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or ()
    message.stop.extend(stop)
    _assign("sampling.stop_token_ids", lambda: message.stop_token_ids.extend(sampling.stop_token_ids or ()))
    _assign("sampling.logit_bias", lambda: message.logit_bias.update(sampling.logit_bias or {}))
    if sampling.structured_outputs is not None:
        _encode_structured_outputs(StructuredOutputs.of(sampling.structured_outputs), message)


def _encode_structured_outputs(given: StructuredOutputs, message: pb.SamplingParams) -> None:
    if given.kind == "json_object":
        message.json_object = True
    elif given.kind == "choice":
        _assign("sampling.choice", lambda: message.choice.texts.extend(given.choice or ()))
    else:
        field = "json_schema" if given.kind == "json" else given.kind
        _assign(f"sampling.{field}", lambda: setattr(message, field, given.text))


def _assign(field: str, assign: Callable[[], object]) -> None:
    """Assigns a field. Protobuf refuses an integer outside its type; the server could say nothing else of it."""
    try:
        assign()
    except ValueError as error:
        text = f"{field}: {error}"
        violations = (FieldViolation(field, str(error)),)
        raise InvalidRequest(text, code=grpc.StatusCode.INVALID_ARGUMENT, field_violations=violations) from None


_decode_token = decoder(
    TokenLogprobs,
    pb.TokenLogprobs,
    converted={"top": lambda entries: tuple((entry.token_id, entry.logprob) for entry in entries)},
)


def _decode_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...] | None:
    return tuple(map(_decode_token, messages)) or None


_decode_delta = decoder(
    Output,
    pb.GenerateResponse,
    converted={
        "finish_reason": FINISH_REASONS.__getitem__,
        "logprobs": _decode_logprobs,
        "prompt_logprobs": _decode_logprobs,
    },
    apart=("stop_reason", "stop_token_id", "stop_text"),
)
_decode_result = decoder(
    Result,
    pb.GetResultResponse,
    converted={
        "state": RESULT_STATES.__getitem__,
        "outputs": lambda outputs: tuple(map(decode_output, outputs)),
    },
    apart=("error", "failure"),
)
decode_server_info = decoder(ServerInfo, pb.GetServerInfoResponse, {"model_digest": bytes.hex, "special_tokens": dict})
decode_loads = decoder(Loads, pb.GetLoadsResponse)
decode_report = decoder(RequestReport, pb.GetRequestResponse, {"state": REQUEST_STATES.__getitem__})
decode_block_map = decoder(BlockMap, pb.GetBlocksResponse)


def decode_output(response: pb.GenerateResponse) -> Output:
    stop = response.WhichOneof("stop")
    return _decode_delta(response, stop_reason=getattr(response, stop) if stop else None)


def decode_result(response: pb.GetResultResponse) -> Result:
    error = None
    if response.HasField("failure"):
        code = STATUS_CODES[response.failure.code]
        error = ERRORS.get(code, PagewireError)(response.failure.message, code=code)
    return _decode_result(response, error=error)


def decode_error(error: Any, url: str) -> PagewireError:
    """Returns the typed error of a failed grpc call (`grpc.RpcError` of either API), with google.rpc details."""
    code = error.code()
    message = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith("failed to connect"):
        message = f"no server answers at {url} ({message})"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in message:
        message = TIMEOUT_PASSED
    if code is grpc.StatusCode.CANCELLED and message == code.name:
        # The word of gRPC itself where too many calls wait already. Pagewire says why it cancels one.
        code, message = grpc.StatusCode.UNAVAILABLE, f"too many calls wait at {url}; try again later"
    field_violations, retry_delay = _decode_details(error.trailing_metadata() or ())
    error_type = ERRORS.get(code, PagewireError)
    return error_type(message, code=code, field_violations=field_violations, retry_delay=retry_delay)


def decode_failure(failure: pb.StreamFailure) -> PagewireError:
    """Returns the typed error of a request that shares a call: the one that `decode_error` makes of its own call."""
    code = STATUS_CODES[failure.code]
    return ERRORS.get(code, PagewireError)(
        failure.message,
        code=code,
        field_violations=(FieldViolation(failure.field, failure.message),) if failure.field else (),
        retry_delay=failure.retry_delay_seconds if failure.HasField("retry_delay_seconds") else None,
    )


def _decode_details(metadata: Iterable[tuple[str, Any]]) -> tuple[tuple[FieldViolation, ...], float | None]:
    """Returns the field violations and the retry delay in seconds of a status."""
    field_violations: list[FieldViolation] = []
    retry_delay = None
    packed = dict(metadata).get("grpc-status-details-bin")
    if packed is None or status_pb2 is None:
        return (), None
    for detail in status_pb2.Status.FromString(packed).details:
        bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad_request):
            field_violations += (FieldViolation(v.field, v.description) for v in bad_request.field_violations)
        elif detail.Unpack(retry_info):
            retry_delay = retry_info.retry_delay.ToNanoseconds() / 1e9
    return tuple(field_violations), retry_delay
