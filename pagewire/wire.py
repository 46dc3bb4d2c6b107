"""The client's data to and from `pagewire.scheduler.v1`. Pure translation."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeGuard

import grpc

from pagewire.completion import Output, Result, TokenLogprobs, Usage
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
from pagewire.server import BlockHolder, BlockMap, Loads, RequestReport, ServerInfo, WorkerInfo

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:  # a machine with a grpcio of its own may lack googleapis-common-protos: errors then have no details
    error_details_pb2 = status_pb2 = None

FINISH_REASONS = {
    pb.FINISH_REASON_UNSPECIFIED: None,
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}
EARLY_STOPPING = {
    "heuristic": pb.EARLY_STOPPING_HEURISTIC,
    False: pb.EARLY_STOPPING_HEURISTIC,
    "first": pb.EARLY_STOPPING_FIRST,
    True: pb.EARLY_STOPPING_FIRST,
    "never": pb.EARLY_STOPPING_NEVER,
}
RESULT_STATES = {
    pb.RESULT_STATE_RUNNING: "running",
    pb.RESULT_STATE_FINISHED: "finished",
    pb.RESULT_STATE_FAILED: "failed",
}
REQUEST_STATES = {
    pb.REQUEST_STATE_WAITING: "waiting",
    pb.REQUEST_STATE_RUNNING: "running",
    pb.REQUEST_STATE_SWAPPING_OUT: "swapping out",
    pb.REQUEST_STATE_SWAPPED: "swapped",
    pb.REQUEST_STATE_SWAPPING_IN: "swapping in",
}
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
) -> pb.GenerateRequest:
    """Raises InvalidRequest for a number that the wire cannot hold, TypeError unless there is exactly one prompt."""
    if (prompt is None) == (prompt_token_ids is None):
        raise TypeError("give either prompt or prompt_token_ids")
    if prompt is not None and not isinstance(prompt, str):
        kind = "a text; token ids go into prompt_token_ids, and only complete, acomplete, chat and achat take lists"
        raise TypeError(f"prompt must be {kind}; got {prompt!r:.80}")
    if prompt_token_ids is not None and not are_token_ids(prompt_token_ids):
        raise TypeError(f"prompt_token_ids must be a list of integers, of one prompt; got {prompt_token_ids!r:.80}")
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be SamplingParams, such as SamplingParams(max_tokens=4); got {sampling!r:.80}")
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
    return request


def split_prompt(prompt: object, index: int) -> tuple[str | None, Sequence[int] | None]:
    """The text or the token ids of a list's prompt at some place. Raises TypeError."""
    if isinstance(prompt, str):
        return prompt, None
    if are_token_ids(prompt):
        return None, prompt
    hint = "; the token ids of one prompt go into prompt_token_ids" if is_integer(prompt) else ""
    raise TypeError(f"prompt {index} of the list is {prompt!r:.80}, but must be a text or token ids{hint}")


def as_prompts(token_ids: Iterable[Any]) -> tuple[list[Sequence[int]], bool]:
    """Lists of token ids, and whether there was only one, not in a list. Raises TypeError."""
    given = list(token_ids)
    if all(map(is_integer, given)):
        return [given], True
    if not all(map(are_token_ids, given)):
        raise TypeError("token_ids must be a list of integers, or a list of such lists")
    return given, False


def encode_detokenize(prompts: Iterable[Sequence[int]], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Raises InvalidRequest for an id that the wire cannot hold."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    for prompt in prompts:
        _assign("prompts.ids", partial(request.prompts.add().ids.extend, prompt))
    return request


def decode_prompts(response: pb.TokenizeResponse) -> list[list[int]]:
    return [list(prompt.ids) for prompt in response.prompts]


def are_token_ids(value: object) -> TypeGuard[Sequence[int]]:
    return not isinstance(value, str | bytes) and isinstance(value, Iterable) and all(map(is_integer, value))


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


def _assign(field: str, assign: Callable[[], object]) -> None:
    """Protobuf refuses an integer outside the field's type: the server could say nothing else of it."""
    try:
        assign()
    except ValueError as error:
        text = f"{field}: {error}"
        violations = (FieldViolation(field, str(error)),)
        raise InvalidRequest(text, code=grpc.StatusCode.INVALID_ARGUMENT, field_violations=violations) from None


def decode_output(response: pb.GenerateResponse) -> Output:
    stop = response.WhichOneof("stop")
    return Output(
        request_id=response.request_id,
        index=response.index,
        token_ids=tuple(response.token_ids),
        text=response.text,
        finish_reason=FINISH_REASONS[response.finish_reason],
        logprobs=_decode_logprobs(response.logprobs),
        cumulative_logprob=response.cumulative_logprob if response.HasField("cumulative_logprob") else None,
        prompt_logprobs=_decode_logprobs(response.prompt_logprobs),
        usage=_decode_usage(response.usage) if response.HasField("usage") else None,
        first_token=response.first_token,
        stop_reason=getattr(response, stop) if stop else None,
    )


def _decode_usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _decode_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...] | None:
    entries = (
        TokenLogprobs(
            entry.token_id, entry.logprob, entry.rank, tuple((top.token_id, top.logprob) for top in entry.top)
        )
        for entry in messages
    )
    return tuple(entries) or None


def decode_server_info(response: pb.GetServerInfoResponse) -> ServerInfo:
    worker = response.worker
    return ServerInfo(
        version=response.version,
        served_model_name=response.served_model_name,
        instance_id=response.instance_id,
        max_model_len=response.max_model_len,
        vocab_size=response.vocab_size,
        eos_token_ids=tuple(response.eos_token_ids),
        has_tokenizer=response.has_tokenizer,
        chat_template=response.chat_template if response.HasField("chat_template") else None,
        max_num_seqs=response.max_num_seqs,
        max_num_batched_tokens=response.max_num_batched_tokens,
        pipeline_depth=response.pipeline_depth,
        worker=_fields(WorkerInfo, worker) if response.HasField("worker") else None,
        model_digest=response.model_digest.hex(),
        max_sequence_tokens=response.max_sequence_tokens,
        unavailable_reason=response.unavailable_reason,
        special_tokens=dict(response.special_tokens),
        has_tenants=response.has_tenants,
    )


def decode_loads(response: pb.GetLoadsResponse) -> Loads:
    return _fields(Loads, response)


def decode_result(response: pb.GetResultResponse) -> Result:
    error = None
    if response.HasField("failure"):
        code = STATUS_CODES[response.failure.code]
        error = ERRORS.get(code, PagewireError)(response.failure.message, code=code)
    outputs = tuple(decode_output(output) for output in response.outputs)
    return Result(response.request_id, RESULT_STATES[response.state], outputs, error)


def decode_report(response: pb.GetRequestResponse) -> RequestReport:
    names = RequestReport.__dataclass_fields__.keys() - {"state", "queue_position", "holders"}
    return RequestReport(
        state=REQUEST_STATES[response.state],
        queue_position=response.queue_position if response.HasField("queue_position") else None,
        holders=tuple(
            BlockHolder(holder.request_id if holder.HasField("request_id") else None, holder.num_blocks)
            for holder in response.holders
        ),
        **{name: getattr(response, name) for name in names},
    )


def decode_block_map(response: pb.GetBlocksResponse) -> BlockMap:
    return BlockMap(tuple(response.owners), tuple(response.device_blocks), tuple(response.host_blocks))


def _fields(data_type: type[Any], message: Any) -> Any:
    """An instance of a dataclass whose fields are a message's own, name by name."""
    return data_type(**{name: getattr(message, name) for name in data_type.__dataclass_fields__})


def decode_error(error: Any, url: str) -> PagewireError:
    """The typed error of a failed grpc call (`grpc.RpcError` of either API), with google.rpc details."""
    code = error.code()
    message = error.details() or code.name
    if code is grpc.StatusCode.UNAVAILABLE and message.startswith("failed to connect"):
        message = f"no server answers at {url} ({message})"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in message:
        message = TIMEOUT_PASSED
    field_violations, retry_delay = _decode_details(error.trailing_metadata() or ())
    error_type = ERRORS.get(code, PagewireError)
    return error_type(message, code=code, field_violations=field_violations, retry_delay=retry_delay)


def decode_failure(failure: pb.StreamFailure) -> PagewireError:
    """The typed error of a request that shares a call: what `decode_error` makes of one that does not."""
    code = STATUS_CODES[failure.code]
    return ERRORS.get(code, PagewireError)(
        failure.message,
        code=code,
        field_violations=(FieldViolation(failure.field, failure.message),) if failure.field else (),
        retry_delay=failure.retry_delay_seconds if failure.HasField("retry_delay_seconds") else None,
    )


def _decode_details(metadata: Iterable[tuple[str, Any]]) -> tuple[tuple[FieldViolation, ...], float | None]:
    """The field violations and the retry delay in seconds of a status."""
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
