from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_OK: _ClassVar[RowStatus]
    ROW_STATUS_NAN_LOGITS: _ClassVar[RowStatus]
    ROW_STATUS_OUT_OF_MEMORY: _ClassVar[RowStatus]
    ROW_STATUS_GRAMMAR_FAILED: _ClassVar[RowStatus]
    ROW_STATUS_GRAMMAR_LIMIT: _ClassVar[RowStatus]
    ROW_STATUS_LATE: _ClassVar[RowStatus]
    ROW_STATUS_GRAMMAR_DEAD_END: _ClassVar[RowStatus]
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
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_OK: RowStatus
ROW_STATUS_NAN_LOGITS: RowStatus
ROW_STATUS_OUT_OF_MEMORY: RowStatus
ROW_STATUS_GRAMMAR_FAILED: RowStatus
ROW_STATUS_GRAMMAR_LIMIT: RowStatus
ROW_STATUS_LATE: RowStatus
ROW_STATUS_GRAMMAR_DEAD_END: RowStatus

class ExecuteRequest(_message.Message):
    __slots__ = ("hello", "plan")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    plan: StepPlan
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("ready", "refusal", "result", "heartbeat", "grammar", "starting", "results")
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ready: WorkerCapacity
    refusal: Refusal
    result: StepResult
    heartbeat: Heartbeat
    grammar: GrammarReport
    starting: WorkerStarting
    results: StepResults
    def __init__(self, ready: _Optional[_Union[WorkerCapacity, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., grammar: _Optional[_Union[GrammarReport, _Mapping]] = ..., starting: _Optional[_Union[WorkerStarting, _Mapping]] = ..., results: _Optional[_Union[StepResults, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "instance_id", "epoch", "pipeline_depth")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    instance_id: str
    epoch: int
    pipeline_depth: int
    def __init__(self, protocol_version: _Optional[int] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., pipeline_depth: _Optional[int] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("worker_id", "model_digest", "vocab_size", "max_model_len", "block_size", "num_device_blocks", "block_bytes", "max_num_seqs", "max_num_batched_tokens", "device", "dtype", "attention_backend", "num_host_blocks", "swap_bandwidth", "tensor_parallel_rank", "tensor_parallel_size", "quantization", "grammar_version", "gates_grammars", "tables_digest", "weight_format", "weight_bytes", "is_bidirectional", "layer_groups", "num_device_states", "num_host_states", "state_bytes", "num_state_layers", "max_leased_steps")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_VERSION_FIELD_NUMBER: _ClassVar[int]
    GATES_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    TABLES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_BIDIRECTIONAL_FIELD_NUMBER: _ClassVar[int]
    LAYER_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DEVICE_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_STATES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASED_STEPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    model_digest: bytes
    vocab_size: int
    max_model_len: int
    block_size: int
    num_device_blocks: int
    block_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    attention_backend: str
    num_host_blocks: int
    swap_bandwidth: float
    tensor_parallel_rank: int
    tensor_parallel_size: int
    quantization: str
    grammar_version: str
    gates_grammars: bool
    tables_digest: str
    weight_format: str
    weight_bytes: int
    is_bidirectional: bool
    layer_groups: _containers.RepeatedCompositeFieldContainer[LayerGroup]
    num_device_states: int
    num_host_states: int
    state_bytes: int
    num_state_layers: int
    max_leased_steps: int
    def __init__(self, worker_id: _Optional[str] = ..., model_digest: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_device_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., attention_backend: _Optional[str] = ..., num_host_blocks: _Optional[int] = ..., swap_bandwidth: _Optional[float] = ..., tensor_parallel_rank: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ..., quantization: _Optional[str] = ..., grammar_version: _Optional[str] = ..., gates_grammars: bool = ..., tables_digest: _Optional[str] = ..., weight_format: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., is_bidirectional: bool = ..., layer_groups: _Optional[_Iterable[_Union[LayerGroup, _Mapping]]] = ..., num_device_states: _Optional[int] = ..., num_host_states: _Optional[int] = ..., state_bytes: _Optional[int] = ..., num_state_layers: _Optional[int] = ..., max_leased_steps: _Optional[int] = ...) -> None: ...

class LayerGroup(_message.Message):
    __slots__ = ("sliding_window", "num_layers")
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    sliding_window: int
    num_layers: int
    def __init__(self, sliding_window: _Optional[int] = ..., num_layers: _Optional[int] = ...) -> None: ...

class WorkerStarting(_message.Message):
    __slots__ = ("doing",)
    DOING_FIELD_NUMBER: _ClassVar[int]
    doing: str
    def __init__(self, doing: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "epoch", "instance_id", "message")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Refusal.Reason]
        REASON_STALE_EPOCH: _ClassVar[Refusal.Reason]
        REASON_PROTOCOL_VERSION: _ClassVar[Refusal.Reason]
        REASON_FUTURE_EPOCH: _ClassVar[Refusal.Reason]
    REASON_UNSPECIFIED: Refusal.Reason
    REASON_STALE_EPOCH: Refusal.Reason
    REASON_PROTOCOL_VERSION: Refusal.Reason
    REASON_FUTURE_EPOCH: Refusal.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: Refusal.Reason
    epoch: int
    instance_id: str
    message: str
    def __init__(self, reason: _Optional[_Union[Refusal.Reason, str]] = ..., epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("epoch", "step", "released_slots", "swap_out_device_blocks", "swap_out_host_blocks", "swap_in_host_blocks", "swap_in_device_blocks", "openings", "append_tables", "append_block_ids", "work_slots", "work_num_tokens", "copy_source_blocks", "copy_target_blocks", "fork_source_slots", "fork_target_slots", "set_block_tables", "set_block_indexes", "set_block_ids", "append_token_slots", "append_token_ids", "added_grammars", "released_grammar_ids", "set_state_slots", "set_state_firsts", "set_state_seconds", "save_slots", "save_positions", "save_states", "num_leased_steps", "ends_lease")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_OUT_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_DEVICE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    APPEND_TABLES_FIELD_NUMBER: _ClassVar[int]
    APPEND_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    WORK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WORK_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPY_SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COPY_TARGET_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FORK_SOURCE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    FORK_TARGET_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SET_BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SET_BLOCK_INDEXES_FIELD_NUMBER: _ClassVar[int]
    SET_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    APPEND_TOKEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    APPEND_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADDED_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_GRAMMAR_IDS_FIELD_NUMBER: _ClassVar[int]
    SET_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SET_STATE_FIRSTS_FIELD_NUMBER: _ClassVar[int]
    SET_STATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAVE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_STEPS_FIELD_NUMBER: _ClassVar[int]
    ENDS_LEASE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    released_slots: _containers.RepeatedScalarFieldContainer[int]
    swap_out_device_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_out_host_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_in_host_blocks: _containers.RepeatedScalarFieldContainer[int]
    swap_in_device_blocks: _containers.RepeatedScalarFieldContainer[int]
    openings: _containers.RepeatedCompositeFieldContainer[RowOpening]
    append_tables: _containers.RepeatedScalarFieldContainer[int]
    append_block_ids: _containers.RepeatedScalarFieldContainer[int]
    work_slots: _containers.RepeatedScalarFieldContainer[int]
    work_num_tokens: _containers.RepeatedScalarFieldContainer[int]
    copy_source_blocks: _containers.RepeatedScalarFieldContainer[int]
    copy_target_blocks: _containers.RepeatedScalarFieldContainer[int]
    fork_source_slots: _containers.RepeatedScalarFieldContainer[int]
    fork_target_slots: _containers.RepeatedScalarFieldContainer[int]
    set_block_tables: _containers.RepeatedScalarFieldContainer[int]
    set_block_indexes: _containers.RepeatedScalarFieldContainer[int]
    set_block_ids: _containers.RepeatedScalarFieldContainer[int]
    append_token_slots: _containers.RepeatedScalarFieldContainer[int]
    append_token_ids: _containers.RepeatedScalarFieldContainer[int]
    added_grammars: _containers.RepeatedCompositeFieldContainer[AddedGrammar]
    released_grammar_ids: _containers.RepeatedScalarFieldContainer[int]
    set_state_slots: _containers.RepeatedScalarFieldContainer[int]
    set_state_firsts: _containers.RepeatedScalarFieldContainer[int]
    set_state_seconds: _containers.RepeatedScalarFieldContainer[int]
    save_slots: _containers.RepeatedScalarFieldContainer[int]
    save_positions: _containers.RepeatedScalarFieldContainer[int]
    save_states: _containers.RepeatedScalarFieldContainer[int]
    num_leased_steps: int
    ends_lease: bool
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., released_slots: _Optional[_Iterable[int]] = ..., swap_out_device_blocks: _Optional[_Iterable[int]] = ..., swap_out_host_blocks: _Optional[_Iterable[int]] = ..., swap_in_host_blocks: _Optional[_Iterable[int]] = ..., swap_in_device_blocks: _Optional[_Iterable[int]] = ..., openings: _Optional[_Iterable[_Union[RowOpening, _Mapping]]] = ..., append_tables: _Optional[_Iterable[int]] = ..., append_block_ids: _Optional[_Iterable[int]] = ..., work_slots: _Optional[_Iterable[int]] = ..., work_num_tokens: _Optional[_Iterable[int]] = ..., copy_source_blocks: _Optional[_Iterable[int]] = ..., copy_target_blocks: _Optional[_Iterable[int]] = ..., fork_source_slots: _Optional[_Iterable[int]] = ..., fork_target_slots: _Optional[_Iterable[int]] = ..., set_block_tables: _Optional[_Iterable[int]] = ..., set_block_indexes: _Optional[_Iterable[int]] = ..., set_block_ids: _Optional[_Iterable[int]] = ..., append_token_slots: _Optional[_Iterable[int]] = ..., append_token_ids: _Optional[_Iterable[int]] = ..., added_grammars: _Optional[_Iterable[_Union[AddedGrammar, _Mapping]]] = ..., released_grammar_ids: _Optional[_Iterable[int]] = ..., set_state_slots: _Optional[_Iterable[int]] = ..., set_state_firsts: _Optional[_Iterable[int]] = ..., set_state_seconds: _Optional[_Iterable[int]] = ..., save_slots: _Optional[_Iterable[int]] = ..., save_positions: _Optional[_Iterable[int]] = ..., save_states: _Optional[_Iterable[int]] = ..., num_leased_steps: _Optional[int] = ..., ends_lease: bool = ...) -> None: ...

class AddedGrammar(_message.Message):
    __slots__ = ("grammar_id", "kind", "text", "end_token_ids")
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    grammar_id: int
    kind: GrammarKind
    text: str
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, grammar_id: _Optional[int] = ..., kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GrammarReport(_message.Message):
    __slots__ = ("epoch", "grammar_id", "error")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    grammar_id: int
    error: str
    def __init__(self, epoch: _Optional[int] = ..., grammar_id: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class RowOpening(_message.Message):
    __slots__ = ("slot", "sequence_id", "token_ids", "num_prompt_tokens", "num_computed_tokens", "block_ids", "sampling", "seed", "sample_index", "traceparent", "grammar_id", "table_lengths", "read_state", "own_states")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    READ_STATE_FIELD_NUMBER: _ClassVar[int]
    OWN_STATES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    seed: int
    sample_index: int
    traceparent: str
    grammar_id: int
    table_lengths: _containers.RepeatedScalarFieldContainer[int]
    read_state: int
    own_states: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., traceparent: _Optional[str] = ..., grammar_id: _Optional[int] = ..., table_lengths: _Optional[_Iterable[int]] = ..., read_state: _Optional[int] = ..., own_states: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
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

class StepResult(_message.Message):
    __slots__ = ("epoch", "step", "statuses", "token_ids", "logprobs", "prompt_logprobs", "duration_us", "candidates", "last_moved_step", "parts", "embeddings", "mask_slots", "mask_us", "num_dropped_steps")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    LAST_MOVED_STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    MASK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MASK_US_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_STEPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    statuses: _containers.RepeatedScalarFieldContainer[RowStatus]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    duration_us: int
    candidates: Candidates
    last_moved_step: int
    parts: StepParts
    embeddings: _containers.RepeatedScalarFieldContainer[bytes]
    mask_slots: _containers.RepeatedScalarFieldContainer[int]
    mask_us: _containers.RepeatedScalarFieldContainer[int]
    num_dropped_steps: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., statuses: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., duration_us: _Optional[int] = ..., candidates: _Optional[_Union[Candidates, _Mapping]] = ..., last_moved_step: _Optional[int] = ..., parts: _Optional[_Union[StepParts, _Mapping]] = ..., embeddings: _Optional[_Iterable[bytes]] = ..., mask_slots: _Optional[_Iterable[int]] = ..., mask_us: _Optional[_Iterable[int]] = ..., num_dropped_steps: _Optional[int] = ...) -> None: ...

class StepResults(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class StepParts(_message.Message):
    __slots__ = ("plan_us", "batch_us", "products_us", "attention_us", "norms_us", "rotary_us", "model_us", "head_us", "sampling_us")
    PLAN_US_FIELD_NUMBER: _ClassVar[int]
    BATCH_US_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_US_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_US_FIELD_NUMBER: _ClassVar[int]
    NORMS_US_FIELD_NUMBER: _ClassVar[int]
    ROTARY_US_FIELD_NUMBER: _ClassVar[int]
    MODEL_US_FIELD_NUMBER: _ClassVar[int]
    HEAD_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_US_FIELD_NUMBER: _ClassVar[int]
    plan_us: int
    batch_us: int
    products_us: int
    attention_us: int
    norms_us: int
    rotary_us: int
    model_us: int
    head_us: int
    sampling_us: int
    def __init__(self, plan_us: _Optional[int] = ..., batch_us: _Optional[int] = ..., products_us: _Optional[int] = ..., attention_us: _Optional[int] = ..., norms_us: _Optional[int] = ..., rotary_us: _Optional[int] = ..., model_us: _Optional[int] = ..., head_us: _Optional[int] = ..., sampling_us: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "ranks", "top_token_ids", "top_logprobs")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Candidates(_message.Message):
    __slots__ = ("token_ids", "logprobs", "counts")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("slot", "first_position", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    first_position: int
    logprobs: Logprobs
    def __init__(self, slot: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("epoch", "last_started_step", "last_finished_step", "last_moved_step", "certificates")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_STARTED_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_FINISHED_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_MOVED_STEP_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    last_started_step: int
    last_finished_step: int
    last_moved_step: int
    certificates: _containers.RepeatedCompositeFieldContainer[CertificateLife]
    def __init__(self, epoch: _Optional[int] = ..., last_started_step: _Optional[int] = ..., last_finished_step: _Optional[int] = ..., last_moved_step: _Optional[int] = ..., certificates: _Optional[_Iterable[_Union[CertificateLife, _Mapping]]] = ...) -> None: ...

class CertificateLife(_message.Message):
    __slots__ = ("flag", "begin", "end")
    FLAG_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    flag: str
    begin: int
    end: int
    def __init__(self, flag: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...
