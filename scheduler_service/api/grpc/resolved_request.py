"""Conversion between a core Request and a ResolvedRequest, the form in which a front end sends a request.

A ResolvedRequest lacks the fields that each scheduler sets itself. The scheduler trusts no value in a ResolvedRequest.
It checks the size first. Then it checks the values as strictly as the options of a GenerateRequest.
"""

from dataclasses import replace
from typing import Any

from pagewire.common.wire.messages import Pooling, SamplingParams
from pagewire.common.wire.sampling_rules import (
    ALL_TOKENS,
    MAX_GRAMMAR_BYTES,
    faults_in,
    faults_of_grammar_text,
)
from pagewire.common.wire.transport.translation import decoder, encoder, unknown_field
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.api.grpc.generate_request import read_request
from scheduler_service.core.request import Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.checkpoint.sampling_defaults import SUPPRESSING_BIAS
from scheduler_service.serving.parsed_request import (
    SAME_NUMBERS,
    ParsedRequest,
    check_names,
    check_tokens,
    num_candidates,
    read_stop,
    refuse,
)
from scheduler_service.serving.refusal import invalid
from scheduler_service.serving.tenants.caller import Call

# Increased with every change of ResolvedRequest. The front end and the scheduler must have the same version.
FRONT_END_PROTOCOL = 1
# The limit for all fields except the prompt and the grammar, so that they can be decoded without blocking the event
# loop for long.
_OTHER_BYTES = 64 << 10
_SCHEDULERS_OWN = ("deadline", "traceparent", "output_mode", "has_stop_texts")
_encode = encoder(Request, scheduler_pb2.ResolvedRequest, _SCHEDULERS_OWN)
_decode = decoder(Request, scheduler_pb2.ResolvedRequest, apart=_SCHEDULERS_OWN)


def encode_resolved(request: Request, max_sequence_tokens: int) -> scheduler_pb2.ResolvedRequest:
    """Encode a request as the message ResolvedRequest, which a front end sends to its scheduler.

    If prompt and output would fill the context, the field `max_tokens` remains unset, so that the scheduler computes
    the limit itself.
    """
    message = _encode(request)
    if len(request.prompt_token_ids) + request.max_tokens == max_sequence_tokens:
        message.max_tokens = 0
    return message


def submitted(
    message: scheduler_pb2.Submission | scheduler_pb2.SubmitRequest,
) -> scheduler_pb2.ResolvedRequest | scheduler_pb2.GenerateRequest:
    """Return the ResolvedRequest or the GenerateRequest that a message contains. If the message contains both, return
    the ResolvedRequest."""
    return message.resolved if message.HasField("resolved") else message.request


def read_submitted(
    message: scheduler_pb2.Submission | scheduler_pb2.SubmitRequest, call: Call, model: ModelInfo
) -> ParsedRequest:
    """Parse the request in a Submission or SubmitRequest message. A client sends it as a GenerateRequest, and a front
    end as a ResolvedRequest. Raise RefusedError if the request is invalid."""
    if not message.HasField("resolved"):
        return read_request(message.request, call, model)
    if isinstance(message, scheduler_pb2.Submission):
        return decode_resolved(message.resolved, call, model)
    return replace(
        decode_resolved(message.resolved, call, model, tuple(message.stop)),
        include_stop_text=message.include_stop_text,
        skip_special_tokens=message.skip_special_tokens,
    )


def decode_resolved(
    message: scheduler_pb2.ResolvedRequest, call: Call, model: ModelInfo, stop: tuple[str, ...] = ()
) -> ParsedRequest:
    """Check a ResolvedRequest from a front end, and return it as a parsed request. The tokens of the prompt are checked
    later.

    `stop` contains the texts that end the output. Raise RefusedError if a value is invalid, or if a value that the
    front end derived from the options differs from this scheduler's own result.
    """
    rest = scheduler_pb2.ResolvedRequest()
    rest.CopyFrom(message)
    rest.ClearField("prompt_token_ids")
    if (size := rest.ByteSize()) > (limit := min(rest.grammar.ByteSize(), MAX_GRAMMAR_BYTES) + _OTHER_BYTES):
        raise invalid("resolved", f"the request has {size} bytes besides its prompt, the limit is {limit}; shorten it")
    if reason := unknown_field(rest):
        raise invalid("resolved", f"{reason}; install the same release for front end and scheduler")
    rest.tenant = call.caller.tenant(rest.tenant)
    try:
        request = _decode(rest)
        options = _options(request, model) | ({"stop": stop} if stop else {})
    except ValueError as error:
        raise invalid("resolved", f"the request cannot be read: {error}") from None
    check_names(request)
    refuse(faults_in(options))
    if request.grammar is not None:
        refuse(faults_of_grammar_text(request.grammar.kind.name.lower(), request.grammar.text))
    check_tokens(options, model)
    read_stop(options, model)
    if not _matches_derived_values(request, model):
        raise invalid(
            "resolved",
            "the front end resolved the request differently from this server; install the same release for both, "
            "and start them with the same --model",
        )
    return ParsedRequest(request, message.prompt_token_ids, max_tokens=request.max_tokens or None, stop=stop)


def _options(request: Request, model: ModelInfo) -> dict[str, Any]:
    """Return the sampling options that a request contains, by name, as a client would have sent them. Values that the
    checkpoint's files add, such as its end tokens, are omitted.

    Raise ValueError if the number of logit biases differs from the number of their tokens.
    """
    sampling = request.sampling
    if sampling.pooling is not Pooling.NONE:
        return {}
    biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    options: dict[str, Any] = {
        "n": request.n,
        "stop_token_ids": [id for id in sampling.stop_token_ids if id not in model.eos_token_ids],
        "logit_bias": {token_id: bias for token_id, bias in biases if bias != SUPPRESSING_BIAS},
        **{name: getattr(sampling, name) for name in SAME_NUMBERS},
    }
    if request.beam is not None:
        options |= {"beam_width": request.beam.beam_width, "length_penalty": request.beam.length_penalty}
    reported = {"prompt_logprobs": sampling.num_prompt_logprobs, "logprobs": sampling.num_logprobs}
    if sampling.logprob_token_ids:
        reported["logprobs"], options["logprob_token_ids"] = None, sampling.logprob_token_ids
    every = model.vocab_size
    return options | {name: ALL_TOKENS if num == every else num for name, num in reported.items() if num is not None}


def _matches_derived_values(request: Request, model: ModelInfo) -> bool:
    """Return whether the values that the front end derived from the request's options equal this scheduler's own
    results. Examples of such values are the sorted stop tokens and the number of beam candidates."""
    sampling, grammar, listed = request.sampling, request.grammar, request.sampling.logprob_token_ids
    if sampling.pooling is not Pooling.NONE:
        pooled = SamplingParams(pooling=model.embedding.pooling)
        return request == replace(request, sampling=pooled, max_tokens=0, seed=0, n=1, beam=None, grammar=None)
    biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    return (
        all(ids == tuple(sorted({*ids})) for ids in (sampling.stop_token_ids, sampling.logit_bias_token_ids))
        and tuple(id for id, bias in biases if bias == SUPPRESSING_BIAS) == model.sampling_defaults.logit_bias_token_ids
        and len({*listed}) == len(listed)
        and (not listed or sampling.num_logprobs == len(listed))
        and sampling.num_candidates == num_candidates(sampling, request.beam, grammar, model)
        and (grammar is None or grammar.end_token_ids == model.grammar_end_token_ids)
    )
