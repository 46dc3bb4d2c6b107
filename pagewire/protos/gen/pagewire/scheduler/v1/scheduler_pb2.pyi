from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_HEURISTIC: _ClassVar[EarlyStopping]
    EARLY_STOPPING_FIRST: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_OBJECT: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_CHOICE: _ClassVar[GrammarKind]
    GRAMMAR_KIND_GRAMMAR: _ClassVar[GrammarKind]
    GRAMMAR_KIND_STRUCTURAL_TAG: _ClassVar[GrammarKind]

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class ResultState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESULT_STATE_UNSPECIFIED: _ClassVar[ResultState]
    RESULT_STATE_RUNNING: _ClassVar[ResultState]
    RESULT_STATE_FINISHED: _ClassVar[ResultState]
    RESULT_STATE_FAILED: _ClassVar[ResultState]

class RequestState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_STATE_UNSPECIFIED: _ClassVar[RequestState]
    REQUEST_STATE_WAITING: _ClassVar[RequestState]
    REQUEST_STATE_RUNNING: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPING_OUT: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPED: _ClassVar[RequestState]
    REQUEST_STATE_SWAPPING_IN: _ClassVar[RequestState]

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_DEVICE: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_HEURISTIC: EarlyStopping
EARLY_STOPPING_FIRST: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_JSON_OBJECT: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_CHOICE: GrammarKind
GRAMMAR_KIND_GRAMMAR: GrammarKind
GRAMMAR_KIND_STRUCTURAL_TAG: GrammarKind
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
RESULT_STATE_UNSPECIFIED: ResultState
RESULT_STATE_RUNNING: ResultState
RESULT_STATE_FINISHED: ResultState
RESULT_STATE_FAILED: ResultState
REQUEST_STATE_UNSPECIFIED: RequestState
REQUEST_STATE_WAITING: RequestState
REQUEST_STATE_RUNNING: RequestState
REQUEST_STATE_SWAPPING_OUT: RequestState
REQUEST_STATE_SWAPPED: RequestState
REQUEST_STATE_SWAPPING_IN: RequestState
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_DEVICE: KvTier
KV_TIER_HOST: KvTier

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "sampling", "priority", "tenant", "cache_salt", "embed", "session_id", "will_return", "retention_seconds", "prompt_name")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EMBED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WILL_RETURN_FIELD_NUMBER: _ClassVar[int]
    RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    sampling: SamplingParams
    priority: int
    tenant: str
    cache_salt: str
    embed: bool
    session_id: str
    will_return: bool
    retention_seconds: int
    prompt_name: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., embed: bool = ..., session_id: _Optional[str] = ..., will_return: bool = ..., retention_seconds: _Optional[int] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "priority", "tenant", "cache_salt", "prompt_name")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    priority: int
    tenant: str
    cache_salt: str
    prompt_name: str
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "embedding", "usage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    embedding: _containers.RepeatedScalarFieldContainer[float]
    usage: Usage
    def __init__(self, request_id: _Optional[str] = ..., embedding: _Optional[_Iterable[float]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "include_stop_str_in_output", "skip_special_tokens", "beam_width", "length_penalty", "early_stopping", "json_schema", "json_object", "regex", "choice", "grammar", "structural_tag", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    grammar: str
    structural_tag: str
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., include_stop_str_in_output: bool = ..., skip_special_tokens: bool = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "first_token", "token_ids", "text", "finish_reason", "stop_token_id", "stop_text", "logprobs", "cumulative_logprob", "prompt_logprobs", "usage", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CUMULATIVE_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    first_token: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: FinishReason
    stop_token_id: int
    stop_text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    cumulative_logprob: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    usage: Usage
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., first_token: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., stop_text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., cumulative_logprob: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("submit", "abort", "stop", "get_loads")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GET_LOADS_FIELD_NUMBER: _ClassVar[int]
    submit: Submission
    abort: StreamAbort
    stop: StreamStop
    get_loads: GetLoadsRequest
    def __init__(self, submit: _Optional[_Union[Submission, _Mapping]] = ..., abort: _Optional[_Union[StreamAbort, _Mapping]] = ..., stop: _Optional[_Union[StreamStop, _Mapping]] = ..., get_loads: _Optional[_Union[GetLoadsRequest, _Mapping]] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("stream_id", "request", "timeout_seconds", "token_only", "traceparent", "tenants_revision", "read_whole", "tells_kept", "resolved")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ONLY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TENANTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    READ_WHOLE_FIELD_NUMBER: _ClassVar[int]
    TELLS_KEPT_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request: GenerateRequest
    timeout_seconds: float
    token_only: bool
    traceparent: str
    tenants_revision: str
    read_whole: bool
    tells_kept: bool
    resolved: ResolvedRequest
    def __init__(self, stream_id: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., token_only: bool = ..., traceparent: _Optional[str] = ..., tenants_revision: _Optional[str] = ..., read_whole: bool = ..., tells_kept: bool = ..., resolved: _Optional[_Union[ResolvedRequest, _Mapping]] = ...) -> None: ...

class ResolvedRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "prompt_token_ids", "sampling", "max_tokens", "seed", "n", "priority", "cache_salt", "beam", "grammar", "session_id", "will_return", "retention_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    BEAM_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WILL_RETURN_FIELD_NUMBER: _ClassVar[int]
    RETENTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: ResolvedSampling
    max_tokens: int
    seed: int
    n: int
    priority: int
    cache_salt: str
    beam: BeamSearch
    grammar: Grammar
    session_id: str
    will_return: bool
    retention_seconds: int
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., beam: _Optional[_Union[BeamSearch, _Mapping]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., session_id: _Optional[str] = ..., will_return: bool = ..., retention_seconds: _Optional[int] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias_token_ids", "logit_bias_values", "min_tokens", "stop_token_ids", "num_logprobs", "num_prompt_logprobs", "num_candidates", "pooling", "logprob_token_ids")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    num_prompt_logprobs: int
    num_candidates: int
    pooling: Pooling
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias_token_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., num_candidates: _Optional[int] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("beam_width", "length_penalty", "early_stopping")
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    beam_width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "end_token_ids")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StreamAbort(_message.Message):
    __slots__ = ("stream_id",)
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    def __init__(self, stream_id: _Optional[int] = ...) -> None: ...

class StreamStop(_message.Message):
    __slots__ = ("stream_id", "num_tokens")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    num_tokens: int
    def __init__(self, stream_id: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("stream_ids", "num_tokens", "token_ids", "deltas", "failures", "server_info", "loads")
    STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    SERVER_INFO_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    stream_ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    deltas: _containers.RepeatedCompositeFieldContainer[StreamDelta]
    failures: _containers.RepeatedCompositeFieldContainer[StreamFailure]
    server_info: GetServerInfoResponse
    loads: GetLoadsResponse
    def __init__(self, stream_ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., deltas: _Optional[_Iterable[_Union[StreamDelta, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[StreamFailure, _Mapping]]] = ..., server_info: _Optional[_Union[GetServerInfoResponse, _Mapping]] = ..., loads: _Optional[_Union[GetLoadsResponse, _Mapping]] = ...) -> None: ...

class StreamDelta(_message.Message):
    __slots__ = ("stream_id", "delta")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    delta: GenerateResponse
    def __init__(self, stream_id: _Optional[int] = ..., delta: _Optional[_Union[GenerateResponse, _Mapping]] = ...) -> None: ...

class StreamFailure(_message.Message):
    __slots__ = ("stream_id", "code", "message", "field", "retry_delay_seconds")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    code: int
    message: str
    field: str
    retry_delay_seconds: float
    def __init__(self, stream_id: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_delay_seconds: _Optional[float] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request", "record", "resolved", "stop", "include_stop_text", "skip_special_tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    record: bytes
    resolved: ResolvedRequest
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_text: bool
    skip_special_tokens: bool
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., record: _Optional[bytes] = ..., resolved: _Optional[_Union[ResolvedRequest, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_text: bool = ..., skip_special_tokens: bool = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "from_token", "from_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    from_token: int
    from_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., from_token: _Optional[int] = ..., from_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class GetResultRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetResultResponse(_message.Message):
    __slots__ = ("request_id", "state", "outputs", "failure", "record")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: ResultState
    outputs: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    failure: Failure
    record: bytes
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[_Union[ResultState, str]] = ..., outputs: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., record: _Optional[bytes] = ...) -> None: ...

class KeepRecordRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "record")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    record: bytes
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., record: _Optional[bytes] = ...) -> None: ...

class KeepRecordResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeleteResultRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class DeleteResultResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class GetRequestRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class GetRequestResponse(_message.Message):
    __slots__ = ("request_id", "tenant", "state", "reason", "queue_position", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_sequences", "num_running_sequences", "num_held_blocks", "num_held_host_blocks", "num_wanted_blocks", "num_free_blocks", "num_preemptions", "holders", "age_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    state: RequestState
    reason: str
    queue_position: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_sequences: int
    num_running_sequences: int
    num_held_blocks: int
    num_held_host_blocks: int
    num_wanted_blocks: int
    num_free_blocks: int
    num_preemptions: int
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    age_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[RequestState, str]] = ..., reason: _Optional[str] = ..., queue_position: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_running_sequences: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_held_host_blocks: _Optional[int] = ..., num_wanted_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("request_id", "num_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    num_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class GetBlocksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBlocksResponse(_message.Message):
    __slots__ = ("owners", "device_blocks", "host_blocks", "device_states", "host_states")
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_STATES_FIELD_NUMBER: _ClassVar[int]
    HOST_STATES_FIELD_NUMBER: _ClassVar[int]
    owners: _containers.RepeatedScalarFieldContainer[str]
    device_blocks: _containers.RepeatedScalarFieldContainer[int]
    host_blocks: _containers.RepeatedScalarFieldContainer[int]
    device_states: _containers.RepeatedScalarFieldContainer[int]
    host_states: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, owners: _Optional[_Iterable[str]] = ..., device_blocks: _Optional[_Iterable[int]] = ..., host_blocks: _Optional[_Iterable[int]] = ..., device_states: _Optional[_Iterable[int]] = ..., host_states: _Optional[_Iterable[int]] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("start_sequence_number", "instance_id")
    START_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    start_sequence_number: int
    instance_id: str
    def __init__(self, start_sequence_number: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("instance_id", "sequence_number", "is_snapshot", "is_continued", "events")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_CONTINUED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    sequence_number: int
    is_snapshot: bool
    is_continued: bool
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, instance_id: _Optional[str] = ..., sequence_number: _Optional[int] = ..., is_snapshot: bool = ..., is_continued: bool = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlockStored
    removed: KvBlockRemoved
    cleared: KvCacheCleared
    def __init__(self, stored: _Optional[_Union[KvBlockStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlockRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvBlockStored(_message.Message):
    __slots__ = ("block_hash", "parent_hash", "token_ids", "tier", "block_size")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    parent_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    tier: KvTier
    block_size: int
    def __init__(self, block_hash: _Optional[int] = ..., parent_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., tier: _Optional[_Union[KvTier, str]] = ..., block_size: _Optional[int] = ...) -> None: ...

class KvBlockRemoved(_message.Message):
    __slots__ = ("block_hash", "tier")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    tier: KvTier
    def __init__(self, block_hash: _Optional[int] = ..., tier: _Optional[_Union[KvTier, str]] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("texts", "add_special_tokens")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    add_special_tokens: bool
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., add_special_tokens: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[TokenIds]
    def __init__(self, prompts: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("prompts", "skip_special_tokens")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[TokenIds]
    skip_special_tokens: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., skip_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "served_model_name", "instance_id", "max_model_len", "vocab_size", "eos_token_ids", "has_tokenizer", "chat_template", "max_num_seqs", "max_num_batched_tokens", "pipeline_depth", "worker", "model_digest", "max_sequence_tokens", "unavailable_reason", "special_tokens", "has_tenants", "structured_output_refusal", "named_chat_templates", "chat_refusals", "served_model_aliases", "front_end_protocol")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NamedChatTemplatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_TENANTS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    NAMED_CHAT_TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    CHAT_REFUSALS_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    FRONT_END_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    version: str
    served_model_name: str
    instance_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_tokenizer: bool
    chat_template: str
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    worker: WorkerInfo
    model_digest: bytes
    max_sequence_tokens: int
    unavailable_reason: str
    special_tokens: _containers.ScalarMap[str, str]
    has_tenants: bool
    structured_output_refusal: str
    named_chat_templates: _containers.ScalarMap[str, str]
    chat_refusals: _containers.RepeatedScalarFieldContainer[str]
    served_model_aliases: _containers.RepeatedScalarFieldContainer[str]
    front_end_protocol: int
    def __init__(self, version: _Optional[str] = ..., served_model_name: _Optional[str] = ..., instance_id: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_tokenizer: bool = ..., chat_template: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., pipeline_depth: _Optional[int] = ..., worker: _Optional[_Union[WorkerInfo, _Mapping]] = ..., model_digest: _Optional[bytes] = ..., max_sequence_tokens: _Optional[int] = ..., unavailable_reason: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., has_tenants: bool = ..., structured_output_refusal: _Optional[str] = ..., named_chat_templates: _Optional[_Mapping[str, str]] = ..., chat_refusals: _Optional[_Iterable[str]] = ..., served_model_aliases: _Optional[_Iterable[str]] = ..., front_end_protocol: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "epoch", "device", "dtype", "attention_backend", "block_size", "num_device_blocks", "block_bytes", "num_host_blocks", "swap_bandwidth", "sliding_window", "grammar_version", "weight_format", "weight_bytes", "layer_group_windows", "state_bytes", "num_state_layers")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUP_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    num_device_blocks: int
    block_bytes: int
    num_host_blocks: int
    swap_bandwidth: float
    sliding_window: int
    grammar_version: str
    weight_format: str
    weight_bytes: int
    layer_group_windows: _containers.RepeatedScalarFieldContainer[int]
    state_bytes: int
    num_state_layers: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., attention_backend: _Optional[str] = ..., block_size: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., swap_bandwidth: _Optional[float] = ..., sliding_window: _Optional[int] = ..., grammar_version: _Optional[str] = ..., weight_format: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., layer_group_windows: _Optional[_Iterable[int]] = ..., state_bytes: _Optional[int] = ..., num_state_layers: _Optional[int] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_waiting_tokens", "num_device_blocks", "num_held_blocks", "num_cached_blocks", "num_preemptions", "num_generation_tokens", "num_prompt_tokens", "num_cached_prompt_tokens", "generation_throughput", "worker_connected", "num_worker_losses", "num_swapped", "num_host_blocks", "num_held_host_blocks", "num_cached_host_blocks", "num_swap_preemptions", "num_moved_blocks_out", "num_moved_blocks_in", "num_host_cached_prompt_tokens", "num_admitted_requests", "num_overdue_requests", "num_kept_session_tokens", "num_lost_session_tokens", "num_discarded_tokens", "time_to_first_token", "time_per_output_token", "queue_time", "num_device_states", "num_held_states", "num_cached_states")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    WORKER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKER_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_BLOCKS_IN_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADMITTED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_OVERDUE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISCARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIME_PER_OUTPUT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_STATES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_device_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_generation_tokens: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    generation_throughput: float
    worker_connected: bool
    num_worker_losses: int
    num_swapped: int
    num_host_blocks: int
    num_held_host_blocks: int
    num_cached_host_blocks: int
    num_swap_preemptions: int
    num_moved_blocks_out: int
    num_moved_blocks_in: int
    num_host_cached_prompt_tokens: int
    num_admitted_requests: int
    num_overdue_requests: int
    num_kept_session_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_lost_session_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_discarded_tokens: int
    time_to_first_token: Latency
    time_per_output_token: Latency
    queue_time: Latency
    num_device_states: int
    num_held_states: int
    num_cached_states: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., num_held_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_generation_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_prompt_tokens: _Optional[int] = ..., generation_throughput: _Optional[float] = ..., worker_connected: bool = ..., num_worker_losses: _Optional[int] = ..., num_swapped: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_held_host_blocks: _Optional[int] = ..., num_cached_host_blocks: _Optional[int] = ..., num_swap_preemptions: _Optional[int] = ..., num_moved_blocks_out: _Optional[int] = ..., num_moved_blocks_in: _Optional[int] = ..., num_host_cached_prompt_tokens: _Optional[int] = ..., num_admitted_requests: _Optional[int] = ..., num_overdue_requests: _Optional[int] = ..., num_kept_session_tokens: _Optional[_Iterable[int]] = ..., num_lost_session_tokens: _Optional[_Iterable[int]] = ..., num_discarded_tokens: _Optional[int] = ..., time_to_first_token: _Optional[_Union[Latency, _Mapping]] = ..., time_per_output_token: _Optional[_Union[Latency, _Mapping]] = ..., queue_time: _Optional[_Union[Latency, _Mapping]] = ..., num_device_states: _Optional[int] = ..., num_held_states: _Optional[int] = ..., num_cached_states: _Optional[int] = ...) -> None: ...

class Latency(_message.Message):
    __slots__ = ("num_sequences", "mean", "p50", "p99")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    mean: float
    p50: float
    p99: float
    def __init__(self, num_sequences: _Optional[int] = ..., mean: _Optional[float] = ..., p50: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...
