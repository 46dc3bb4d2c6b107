"""The state and limits of a server. The fields match the public proto, whose comments give their units."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Information about the worker that is connected to the server: the device, and the configuration of model and KV
    cache."""

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
    layer_group_windows: tuple[int, ...] = ()
    state_bytes: int = 0
    num_state_layers: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The served model and the limits of the server.

    Attributes that need an explanation:

    - `worker`: None while no worker is connected.
    - `model_digest`: hexadecimal.
    - `max_sequence_tokens`: the largest total of prompt and output tokens that a request may have now.
    - `unavailable_reason`: the reason why requests are refused now, or an empty text.
    - `structured_output_refusal`: the reason why requests for structured output are refused, or an empty text.
    - `special_tokens`: texts by the variable names that chat templates use, such as eos_token.
    - `named_chat_templates`: the texts of the templates that can be selected by name.
    - `chat_refusals`: the kinds of conversation for which `chat_template` fails.
    - `served_model_aliases`: additional model names that HTTP requests may use.
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
class Latency:
    """A latency of the sequences that ended recently, in seconds, measured by the scheduler."""

    num_sequences: int
    mean: float
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class Loads:
    """The current load of a server: the numbers of sequences, prompt tokens and KV cache blocks, counters since the
    start of the server, and latencies. A latency is None if no sequence has ended yet."""

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
    time_to_first_token: Latency | None
    time_per_output_token: Latency | None
    queue_time: Latency | None
    num_device_states: int
    num_held_states: int
    num_cached_states: int


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A request to which KV cache blocks on the device are allocated. `request_id` is None for a request of another
    tenant."""

    request_id: str | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """The state of an unfinished request and, if the request waits, the reason.

    `state` is "waiting", "running", "swapping out", "swapped" or "swapping in". `reason` says why the request waits, or
    why it lacks KV cache blocks to continue. It is empty if the request runs without waiting.
    """

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


# The uses of a block. A value from HELD on means that the block is allocated to request `owners[use - HELD]` of the
# map.
FREE, CACHED, MOVING, SHARED, HELD = range(5)


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The use of every KV cache block in device memory and in host memory. Entry i of a list describes block i + 1. If
    the model has states besides K and V, they have lists of their own."""

    owners: tuple[str, ...]
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    device_states: tuple[int, ...] = ()
    host_states: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gauge:
    """A metric that can increase and decrease."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Counter:
    """A metric that only increases."""

    name: str
    labels: Mapping[str, str]
    value: int


Metric = Gauge | Counter
# The names match docs/metrics.md, except that counter names end in _total there, as in vLLM's /metrics.
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
    """Convert the load of a server to gauges and counters with the names that vLLM uses for metrics."""
    labels = {"model_name": model_name, "engine": "0"}
    gauges = [Gauge(name, labels, read(loads)) for name, read in _GAUGES.items()]
    return [*gauges, *(Counter(name, labels, read(loads)) for name, read in _COUNTERS.items())]
