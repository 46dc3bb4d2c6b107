"""A core Request as the GenerateRequest that another scheduler resolves to the same."""

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EarlyStopping, Request

_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: scheduler_pb2.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: scheduler_pb2.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: scheduler_pb2.EARLY_STOPPING_NEVER,
}


def encode_request(
    request: Request, eos_token_ids: tuple[int, ...], max_sequence_tokens: int
) -> scheduler_pb2.GenerateRequest:
    """Everything explicit, but as many tokens as fit: how many those are the other one knows best."""
    message = scheduler_pb2.GenerateRequest(
        request_id=request.request_id,
        token_ids=scheduler_pb2.TokenIds(ids=request.prompt_token_ids),
        sampling=_encode_sampling(request, eos_token_ids),
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
    )
    if len(request.prompt_token_ids) + request.max_tokens != max_sequence_tokens:
        message.sampling.max_tokens = request.max_tokens
    return message


def _encode_sampling(request: Request, eos_token_ids: tuple[int, ...]) -> scheduler_pb2.SamplingParams:
    sampling, beam = request.sampling, request.beam
    ends_at_eos = bool(eos_token_ids) and set(eos_token_ids) <= set(sampling.stop_token_ids)
    message = scheduler_pb2.SamplingParams(
        n=request.n,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=request.seed,
        stop_token_ids=[id for id in sampling.stop_token_ids if not ends_at_eos or id not in eos_token_ids],
        ignore_eos=not ends_at_eos,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
        logit_bias=dict(zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)),
    )
    if beam is None:
        message.temperature = sampling.temperature
        message.top_p = sampling.top_p
        message.top_k = sampling.top_k
        message.min_p = sampling.min_p
    else:
        message.beam_width = beam.beam_width
        message.length_penalty = beam.length_penalty
        message.early_stopping = _EARLY_STOPPING[beam.early_stopping]
    return message
