"""A core Request as the GenerateRequest that another scheduler resolves to the same."""

import json

from pagewire.common.messages import GrammarKind, Pooling
from pagewire.common.transport.translation import enum_names
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import Grammar, Request
from scheduler_service.rpc.public.generate_request import SAME_NUMBERS
from scheduler_service.serving.sampling_defaults import FILTERS_OFF, SUPPRESSING_BIAS

_EARLY_STOPPING = {name: number for number, name in enum_names(scheduler_pb2.EarlyStopping.DESCRIPTOR).items()}


def encode_request(
    request: Request, eos_token_ids: tuple[int, ...], max_sequence_tokens: int
) -> scheduler_pb2.GenerateRequest:
    """Everything explicit, but as many tokens as fit: how many those are the other one knows best."""
    message = scheduler_pb2.GenerateRequest(
        request_id=request.request_id,
        token_ids=scheduler_pb2.TokenIds(ids=request.prompt_token_ids),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
        will_return=request.will_return,
        retention_seconds=request.retention_seconds,
    )
    if request.sampling.pooling is not Pooling.NONE:
        message.embed = True
        return message
    message.sampling.CopyFrom(_encode_sampling(request, eos_token_ids))
    if len(request.prompt_token_ids) + request.max_tokens != max_sequence_tokens:
        message.sampling.max_tokens = request.max_tokens
    return message


def _encode_sampling(request: Request, eos_token_ids: tuple[int, ...]) -> scheduler_pb2.SamplingParams:
    sampling, beam = request.sampling, request.beam
    ends_at_eos = bool(eos_token_ids) and set(eos_token_ids) <= set(sampling.stop_token_ids)
    biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
    message = scheduler_pb2.SamplingParams(
        n=request.n,
        seed=request.seed,
        stop_token_ids=[id for id in sampling.stop_token_ids if not ends_at_eos or id not in eos_token_ids],
        ignore_eos=not ends_at_eos,
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
        # What the checkpoint suppresses the other one knows too.
        logit_bias={token_id: bias for token_id, bias in biases if bias != SUPPRESSING_BIAS},
    )
    for name in SAME_NUMBERS:
        if beam is None or name not in FILTERS_OFF:
            setattr(message, name, getattr(sampling, name))
    if request.grammar is not None:
        _encode_grammar(request.grammar, message)
    if beam is not None:
        message.beam_width = beam.beam_width
        message.length_penalty = beam.length_penalty
        message.early_stopping = _EARLY_STOPPING[beam.early_stopping.value]
    return message


def _encode_grammar(grammar: Grammar, message: scheduler_pb2.SamplingParams) -> None:
    """Its end tokens are the model's own, which the other one knows too."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            message.json_object = True
        case GrammarKind.CHOICE:
            message.choice.texts.extend(json.loads(grammar.text))
        case kind:
            setattr(message, kind.name.lower(), grammar.text)
