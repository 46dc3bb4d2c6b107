"""What a server says of itself. The fields are those of the public proto; its comments give units."""

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and its limits. `worker` is None while none is connected."""

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


@dataclass(frozen=True, slots=True)
class Loads:
    """What the server is doing now: sequences, prompt tokens, blocks, and counts since its start."""

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
