"""The translation between the client's data types and `pagewire.scheduler.v1`, without I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.client.arguments import are_token_ids, check_text, is_integer, is_real, require
from pagewire.client.completion import Output, Result, TokenLogprobs
from pagewire.client.conversation import Session
from pagewire.client.errors import (
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
from pagewire.client.sampling_params import SamplingParams
from pagewire.client.server_info import BlockMap, Loads, RequestReport, ServerInfo
from pagewire.common.wire.sampling_rules import ALL_TOKENS, LOGPROB_NUMBERS, UINT32, UINT64, Range
from pagewire.common.wire.transport.http_proxy import http_proxy_of
from pagewire.common.wire.transport.message_size import of_cut_off
from pagewire.common.wire.transport.translation import decoder, enum_names
from pagewire.common.wire.transport.wrong_port import RightPort
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # googleapis-common-protos may be missing beside a system grpcio: errors then lack details
    error_details_pb2 = status_pb2 = None

FINISH_REASONS = {pb.FINISH_REASON_UNSPECIFIED: None} | enum_names(pb.FinishReason.DESCRIPTOR)
# The range of each integer type, and the check of each field type.
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: Range(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: UINT32,
    FieldDescriptor.CPPTYPE_INT64: Range(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: UINT64,
}
_KINDS: dict[int, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(_INTEGERS, ("an integer", is_integer)),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", is_real),
    FieldDescriptor.CPPTYPE_DOUBLE: ("a number", is_real),
    FieldDescriptor.CPPTYPE_BOOL: ("a bool", lambda value: isinstance(value, bool)),
    FieldDescriptor.CPPTYPE_STRING: ("a text", lambda value: isinstance(value, str)),
}
EARLY_STOPPING = {name: number for number, name in enum_names(pb.EarlyStopping.DESCRIPTOR).items()} | {
    False: pb.EARLY_STOPPING_HEURISTIC,
    True: pb.EARLY_STOPPING_FIRST,
}
RESULT_STATES = enum_names(pb.ResultState.DESCRIPTOR)
REQUEST_STATES = {number: name.replace("_", " ") for number, name in enum_names(pb.RequestState.DESCRIPTOR).items()}
_SCHEDULERS_PORT = RightPort(
    give="give the gRPC port of a scheduler or a front end, which is 50051 unless --port says otherwise",
    strangers="a worker's port, another service's or an older server's",
    without_tls="leave out grpcs://",
    name_authority="give tls_ca (--tls-ca)",
    give_name="call it by the name that is in there",
    with_tls="a port with TLS (grpcs://), one that asks for another certificate, or for one that is good (tls_cert)",
)
# The beginnings of gRPC's messages about a failed connection.
_NO_CONNECTION = ("failed to connect", "errors resolving")
# The status codes that gRPC itself reports for a failed connection. A Pagewire server always adds a retry delay to
# these codes.
_LOST_ON_THE_WAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
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
    sampling: SamplingParams | None,
    *,
    prompt_token_ids: object = None,
    session: object = None,
    **fields: object,
) -> pb.GenerateRequest:
    """Encode a generation request as a message of the public proto. `fields` are additional fields of the message.

    Raise TypeError unless exactly one prompt is given, and InvalidRequest for a number that its field cannot represent.
    """
    if (prompt is None) == (prompt_token_ids is None):
        raise TypeError("give either prompt or prompt_token_ids")
    kind = "a text; pass token ids as prompt_token_ids, and lists of prompts only to complete, chat and embed"
    require("prompt", prompt, isinstance(prompt, str | None), kind)
    is_legal = prompt_token_ids is None or are_token_ids(prompt_token_ids)
    require("prompt_token_ids", prompt_token_ids, is_legal, "a list of integers, of one prompt")
    require("session", session, isinstance(session, Session | None), "a Session, such as Session('chat-7')")
    request = message(pb.GenerateRequest, **fields)
    if prompt is not None:
        put(request, "text", prompt, argument="prompt")
    if prompt_token_ids is not None:
        request.token_ids.SetInParent()
        put(request.token_ids, "ids", prompt_token_ids, "token_ids.ids")
    if sampling is not None:
        _encode_sampling(sampling, request.sampling)
    if isinstance(session, Session):
        _encode_session(session, request)
    return request


@contextmanager
def at_place(index: int) -> Iterator[None]:
    """Prefix the messages of InvalidRequest errors raised inside a `with` block with the position of the prompt in the
    caller's list."""
    try:
        yield
    except InvalidRequest as error:
        text = f"prompt {index}: {error}"
        raise type(error)(text, code=error.code, field_violations=error.field_violations) from None


def closed() -> Cancelled:
    """Return the error to raise from a call if the client was closed during the call."""
    return Cancelled("the client was closed", code=grpc.StatusCode.CANCELLED)


def num_samples(request: pb.GenerateRequest) -> int:
    """Return the number of samples that a generation request asks for. If the request does not set the number, the
    server generates one sample."""
    return max(1, request.sampling.n)


def encode_detokenize(prompts: Iterable[Sequence[int]], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Encode lists of token ids as a request to convert them to texts. Raise InvalidRequest for a token id that the
    field cannot represent."""
    request = message(pb.DetokenizeRequest, skip_special_tokens=skip_special_tokens)
    for index, prompt in enumerate(prompts):
        put(request.prompts.add(), "ids", prompt, f"prompts[{index}].ids")
    return request


def _encode_session(session: Session, request: pb.GenerateRequest) -> None:
    put(request, "session_id", session.id, "session.id")
    for name in ("will_return", "retention_seconds"):
        if getattr(session, name) is not None:
            put(request, name, getattr(session, name), f"session.{name}")


def _encode_sampling(sampling: SamplingParams, message: pb.SamplingParams) -> None:
    message.SetInParent()
    for name, value in sampling.options.items():
        if name == "choice":
            put(message.choice, "texts", value, "sampling.choice")
        elif name in LOGPROB_NUMBERS and value == ALL_TOKENS:
            put(message, name, int(UINT32.high))
        else:
            put(message, name, EARLY_STOPPING[value] if name == "early_stopping" else value, f"sampling.{name}")


def message(kind: type[Any], **fields: Any) -> Any:
    """Create a protobuf message of the type `kind` with the given field values. A value of None leaves an optional
    field unset. Raise the errors of `put` for a value that does not fit its field."""
    made = kind()
    for name, value in fields.items():
        if value is not None or not kind.DESCRIPTOR.fields_by_name[name].has_presence:
            put(made, name, value)
    return made


def put(message: Message, name: str, value: Any, path: str = "", argument: str = "") -> None:
    """Set a field of a protobuf message to a value that the user gave. All such values enter messages through this
    function, because protobuf's own errors would not name the field.

    `path` is the name of the field in errors. `argument` is the caller's name of the value if it differs. Raise
    TypeError for a value of the wrong type, including bytes and tensors, which protobuf would convert. Raise
    InvalidRequest for a value that the field cannot represent.
    """
    field, path = message.DESCRIPTOR.fields_by_name[name], path or name
    # Lists of token ids can be long. `are_token_ids` has already checked their elements.
    if not (field.is_repeated and field.cpp_type in _INTEGERS):
        _check(field, value, path, argument)
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError, OverflowError) as error:
        _check(field, value, path, argument)
        raise TypeError(f"{path} cannot be {value!r:.80}: {error}") from None


def _parts(field: FieldDescriptor, value: Any, path: str) -> Iterator[tuple[FieldDescriptor, Any, str]]:
    """Yield each single value that a protobuf field contains, with its field descriptor and its path. These are the
    elements of a list, or the keys and values of a map. Any other field contains one value."""
    if isinstance(value, Mapping) and field.is_repeated:
        key, part = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        for each in value:
            yield key, each, f"{path}[{each}]"
            yield part, value[each], f"{path}[{each}]"
    elif isinstance(value, Iterable) and field.is_repeated:
        for index, each in enumerate(value):
            yield field, each, f"{path}[{index}]"
    else:
        yield field, value, path


def _check(field: FieldDescriptor, value: Any, path: str, argument: str) -> None:
    """Check that a protobuf field can represent a value. Raise TypeError for a value of the wrong type, and
    InvalidRequest for an integer out of range or a text that cannot be encoded."""
    for place, part, part_path in _parts(field, value, path):
        kind, is_of_kind = _KINDS.get(place.cpp_type, ("", lambda value: True))
        require(part_path, part, is_of_kind(part), kind)
        legal = _INTEGERS.get(place.cpp_type)
        if legal is not None and not legal.holds(part):
            raise InvalidRequest.of_field(part_path, f"{part_path} is {part}, but must be {legal}")
        if isinstance(part, str):
            check_text(part_path, part, argument)


_decode_entry = decoder(
    TokenLogprobs,
    pb.TokenLogprobs,
    converted={"top": lambda entries: tuple((entry.token_id, entry.logprob) for entry in entries)},
    apart=("top_token_ids", "top_logprobs"),
)


def _decode_token(message: pb.TokenLogprobs) -> TokenLogprobs:
    entry = _decode_entry(message)
    if not message.top_token_ids:
        return entry
    return replace(entry, top=(*entry.top, *zip(message.top_token_ids[:], message.top_logprobs[:], strict=False)))


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
    apart=("error", "failure", "record"),
)
decode_server_info = decoder(
    ServerInfo,
    pb.GetServerInfoResponse,
    {"model_digest": bytes.hex, "special_tokens": dict, "named_chat_templates": dict},
    apart=("front_end_protocol",),
)
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
    """Return the client's exception for a failed gRPC call, with the field violations and retry delay from the
    google.rpc details.

    `error` is a `grpc.RpcError` of the synchronous or the asyncio API.
    """
    code = error.code()
    message = error.details() or code.name
    reading = _SCHEDULERS_PORT.reading(url, message)
    if reading is not None:
        message = reading
    elif code is grpc.StatusCode.UNAVAILABLE and message.startswith(_NO_CONNECTION):
        message = f"no server answers at {url} (`pagewire serve MODEL` starts one): {message}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in message:
        message = TIMEOUT_PASSED
    if code is grpc.StatusCode.CANCELLED and message == code.name:
        # gRPC itself cancels calls without a message if too many calls are waiting. Pagewire always gives a reason.
        code, message = grpc.StatusCode.UNAVAILABLE, f"too many calls wait at {url}; try again later"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (too_large := of_cut_off(message)):
        # A retry would fail again, since the message would have the same size.
        code, message = grpc.StatusCode.INVALID_ARGUMENT, too_large
    field_violations, retry_delay = _decode_details(error.trailing_metadata() or ())
    if reading is not None or (code in _LOST_ON_THE_WAY and retry_delay is None):
        proxy = http_proxy_of(url)
        message += proxy.remark if proxy is not None else ""
    error_type = ERRORS.get(code, PagewireError)
    return error_type(message, code=code, field_violations=field_violations, retry_delay=retry_delay)


def decode_failure(failure: pb.StreamFailure) -> PagewireError:
    """Return the client's exception for the failure of one request on a shared GenerateMany call.

    The exception equals the one that `decode_error` returns if the same request fails on a separate call.
    """
    code = STATUS_CODES[failure.code]
    return ERRORS.get(code, PagewireError)(
        failure.message,
        code=code,
        field_violations=(FieldViolation(failure.field, failure.message),) if failure.field else (),
        retry_delay=failure.retry_delay_seconds if failure.HasField("retry_delay_seconds") else None,
    )


def _decode_details(metadata: Iterable[tuple[str, Any]]) -> tuple[tuple[FieldViolation, ...], float | None]:
    """Return the field violations and the retry delay in the google.rpc details of a failed gRPC call. The delay is in
    seconds, or None if the server set none."""
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
