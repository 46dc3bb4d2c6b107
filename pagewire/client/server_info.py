"""The state and the limits of a server. The fields are those of the public proto; its comments give units."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The worker that is connected."""

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


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model that a server has, and the server's limits. `worker` is None while none is connected.

    `model_digest` is hexadecimal, `max_sequence_tokens` the most that a request may have now, `unavailable_reason` why
    requests are refused now, or nothing, `structured_output_refusal` why those are that ask for structured output.
    `special_tokens` holds texts by the names that a chat template uses, such as eos_token. `named_chat_templates` are
    those that are chosen by name, and `chat_refusals` says which kinds of conversation `chat_template` fails on.
    Requests over HTTP may name the model by `served_model_aliases` too.
    """

    version: str
    served_model_name: str
    instance_id: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    chat_template: str | None
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    worker: WorkerInfo | None
    model_digest: str
    max_sequence_tokens: int
    unavailable_reason: str
    special_tokens: Mapping[str, str]
    has_tenants: bool
    structured_output_refusal: str
    named_chat_templates: Mapping[str, str]
    chat_refusals: tuple[str, ...]
    served_model_aliases: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loads:
    """The load of a server now: sequences, prompt tokens, blocks, and counts since its start."""

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
    num_kept_session_tokens: tuple[int, ...]
    num_lost_session_tokens: tuple[int, ...]
    num_discarded_tokens: int


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A request that holds device blocks. `request_id` is None for a request of another tenant."""

    request_id: str | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """The state of a request ("waiting", "running", "swapping out", "swapped", "swapping in") and why it waits."""

    request_id: str
    tenant: str
    state: str
    reason: str
    queue_position: int | None
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
    holders: tuple[BlockHolder, ...]
    age_seconds: float


# What a block is used for. From HELD on it is held by request `owners[use - HELD]` of the map.
FREE, CACHED, MOVING, SHARED, HELD = range(5)


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The use of every block of both pools. Entry i is about block i + 1."""

    owners: tuple[str, ...]
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that goes up and down."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that goes up."""

    name: str
    labels: Mapping[str, str]
    value: int


Metric = Gauge | Counter
# By the names that docs/metrics.md has for the same; those of counters end in _total there, as in vLLM's /metrics.
_GAUGES: dict[str, Callable[[Loads], float]] = {
    "vllm:num_requests_running": attrgetter("num_running"),
    "vllm:num_requests_waiting": attrgetter("num_waiting"),
    "vllm:num_requests_swapped": attrgetter("num_swapped"),
    "vllm:kv_cache_usage_perc": lambda loads: loads.num_held_blocks / (loads.num_device_blocks or 1),
    "vllm:cpu_cache_usage_perc": lambda loads: loads.num_held_host_blocks / (loads.num_host_blocks or 1),
}
_COUNTERS: dict[str, Callable[[Loads], int]] = {
    "vllm:prefix_cache_queries": attrgetter("num_prompt_tokens"),
    "vllm:prefix_cache_hits": attrgetter("num_cached_prompt_tokens"),
    "vllm:prompt_tokens": attrgetter("num_prompt_tokens"),
    "vllm:generation_tokens": lambda loads: loads.num_generation_tokens - loads.num_discarded_tokens,
    "vllm:num_preemptions": attrgetter("num_preemptions"),
}


def metrics_of(loads: Loads, model_name: str) -> list[Metric]:
    """Returns the load of a server as vLLM's metrics."""
    labels = {"model_name": model_name, "engine": "0"}
    gauges = [Gauge(name, labels, read(loads)) for name, read in _GAUGES.items()]
    return [*gauges, *(Counter(name, labels, read(loads)) for name, read in _COUNTERS.items())]
