"""The input and output data of the core."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from pagewire.common.wire.messages import GrammarKind, SamplingParams


class EarlyStopping(Enum):
    """The rule that decides when a beam search may end, once it has `beam_width` finished hypotheses. The members
    correspond to the three values of `early_stopping` in transformers."""

    HEURISTIC = 1  # False: if the best beam, at its present length, cannot beat the worst hypothesis
    FIRST = 2  # True: immediately
    NEVER = 3  # "never": if no continuation of any length can beat it


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The parameters of a request's beam search. At the end, the search returns the `Request.n` finished outputs with
    the best scores."""

    beam_width: int
    length_penalty: float = 1.0  # a hypothesis scores cumulative_logprob / num_output_tokens ** length_penalty
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class OutputMode(Enum):
    """The way in which a client receives the output of a request."""

    STREAMED = "streamed"  # token by token; the output of a beam search is known only at its end
    WHOLE = "whole"  # once, at its end
    DETACHED = "detached"  # stored until a client asks for it


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the output of a request must match (structured output). If an output is complete, any of the end
    tokens may end it."""

    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]  # at least one, in rising order


@dataclass(frozen=True, slots=True)
class Request:
    """A validated generation request, as the scheduler receives it. All defaults are filled in."""

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int = 0
    n: int = 1  # samples, or hypotheses of a beam search
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    beam: BeamParams | None = None
    deadline: float | None = None  # seconds of the caller's clock; orders requests under the policy "deadline"
    traceparent: str = ""  # W3C trace context, passed to the worker
    output_mode: OutputMode = OutputMode.STREAMED
    grammar: Grammar | None = None  # each output must match it
    session_id: str = ""  # the tenant's conversation that it belongs to; empty: found by its prefix
    will_return: bool | None = None  # whether a later request will start with its prompt and output
    retention_seconds: int | None = None  # how long its cached blocks are worth keeping, at least 1
    has_stop_texts: bool = False  # its client may end a sample at any token

    @property
    def num_rows(self) -> int:
        """The largest number of sequences of this request that run on the worker at the same time."""
        return self.beam.beam_width if self.beam else self.n


class AdmissionReason(Enum):
    """The reason why the scheduler rejects a new request."""

    INVALID = "invalid"  # the request can never run
    DUPLICATE = "duplicate"  # the tenant has an unfinished request of this id
    QUEUE_FULL = "queue_full"  # try again later


class AdmissionError(Exception):
    """The exception that `Scheduler.add` raises for a request that it rejects. `field` is the name of the invalid
    request field, or empty if no field is at fault."""

    def __init__(self, reason: AdmissionReason, field_name: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field_name


class EndReason(Enum):
    """The reason why a sequence ended.

    The client receives one of the first three reasons as a finish reason, and any other reason as an error status.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_LOGITS = "nan_logits"  # INTERNAL
    OUT_OF_MEMORY = "out_of_memory"  # RESOURCE_EXHAUSTED: of the worker, while it computed this request alone
    CRASHES_WORKER = "crashes_worker"  # INTERNAL
    NO_LONGER_FITS = "no_longer_fits"  # RESOURCE_EXHAUSTED: the new worker is smaller
    NO_WORKER = "no_worker"  # UNAVAILABLE
    GRAMMAR_FAILED = "grammar_failed"  # INTERNAL
    GRAMMAR_DEAD_END = "grammar_dead_end"  # INVALID_ARGUMENT: the tokenizer has no token that the grammar allows next
    GRAMMAR_LIMIT = "grammar_limit"  # RESOURCE_EXHAUSTED: the limits on computing the allowed tokens of a step


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The event that a sequence has ended. Each sequence has exactly one such event.

    The times are in seconds of the caller's clock. If a step never happened, its time is None. For example,
    `first_scheduled_at` is None if the sequence was never scheduled.
    """

    sequence_id: int
    reason: EndReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    stop_token_id: int | None
    message: str
    arrived_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    # Alternately the time when its request was preempted or lost its worker, and the time when it ran again. The last
    # pause may be open.
    pauses: tuple[float, ...] = ()
    embedding: bytes = b""  # float32, little-endian; empty if not requested or not computed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability and the rank of one token. It also contains log-probabilities of other tokens at the same
    position: the most likely tokens, or tokens that the request lists."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first; or this token, then the listed tokens


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The complete output of one sequence of a beam search. It is known only at the end of the search."""

    sequence_id: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """The output of one scheduler event for the clients: new tokens, their log-probabilities, and the ends of
    sequences.

    `token_ids[i]` is a new token of sequence `sequence_ids[i]`. If the sequence ends with this token, it is also in
    `ended`. `logprobs` has an entry for each sequence that requested log-probabilities. The tokens of a beam search are
    only in `hypotheses`. Its ends are in `ended`.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: list[SequenceEnd] = field(default_factory=list)


SESSION_AGES_S = (1.0, 10.0, 60.0, 300.0)  # upper bounds in seconds; one further entry is for longer times
NUM_SESSION_AGES = len(SESSION_AGES_S) + 1


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler's metrics: the current values of gauges, and counters of events since the scheduler started. The
    block counts are for the connected worker."""

    num_running: int  # sequences
    num_waiting: int
    num_swapped: int  # sequences swapped out, or moving to or from the host
    num_waiting_tokens: int
    num_device_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_host_blocks: int
    num_held_host_blocks: int
    num_cached_host_blocks: int
    num_preemptions: int  # of requests
    num_swap_preemptions: int  # of these, by swapping
    num_moved_blocks_out: int  # device to host: swaps and demotions
    num_moved_blocks_in: int
    num_prompt_tokens: int  # of sequences that have started
    num_cached_prompt_tokens: int  # of these, prefix cache hits in either tier
    num_host_cached_prompt_tokens: int  # of these, hits in host blocks
    num_generation_tokens: int  # computed
    num_admitted_requests: int = 0  # requests that have started
    num_overdue_requests: int = 0  # of these, scheduled in order of arrival after too long a wait
    # Prompt tokens of requests that continued a session, and that the session's earlier requests had computed: tokens
    # still cached, and tokens lost. By the seconds since the session's last request, see SESSION_AGES_S.
    num_kept_session_tokens: tuple[int, ...] = (0,) * NUM_SESSION_AGES
    num_lost_session_tokens: tuple[int, ...] = (0,) * NUM_SESSION_AGES
    num_discarded_tokens: int = 0  # of num_generation_tokens, tokens that beam searches did not return
    num_device_states: int = 0  # 0: the model has no states besides K and V
    num_held_states: int = 0
    num_cached_states: int = 0


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A request that uses KV cache blocks on the device, and the number of these blocks.

    One entry has `request_id` None. It is the sum over the requests of other tenants, which the caller must not see.
    """

    request_id: str | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A report on one request for operators and clients: its state, the reason why it waits, and the KV cache blocks
    that it uses and still needs."""

    request_id: str
    tenant: str
    state: str  # waiting, running, swapping_out, swapped, swapping_in
    reason: str  # one sentence; empty while it runs without waiting
    queue_position: int | None  # from 1, while it waits to run
    num_prompt_tokens: int
    num_output_tokens: int  # of all its sequences
    num_computed_tokens: int
    num_sequences: int  # unfinished sequences
    num_running_sequences: int
    num_held_blocks: int
    num_held_host_blocks: int
    num_wanted_blocks: int  # blocks that it needs to start or to continue
    num_free_blocks: int
    num_preemptions: int
    holders: tuple[BlockHolder, ...]  # most blocks first
    arrived_at: float


class BlockUse(IntEnum):
    """The use of one KV cache block in a `BlockMap`.

    A value of at least HELD means that one request uses the block. The value is HELD plus the index of the request in
    `BlockMap.owners`.
    """

    FREE = 0
    CACHED = 1  # idle, and its content can be matched
    MOVING = 2  # held only by a move in progress
    SHARED = 3  # held by several requests
    HELD = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A map of all KV cache blocks on the device and on the host, for diagnosis. Entry i is the use of block i + 1,
    because block numbers start at 1. States besides K and V have maps of their own."""

    owners: tuple[str, ...]  # request ids
    device: tuple[int, ...]  # BlockUse
    host: tuple[int, ...]
    device_states: tuple[int, ...] = ()
    host_states: tuple[int, ...] = ()


class Tier(Enum):
    """The tier of memory that contains a copy of a KV cache block's content: the device or the host."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A prefix cache event: the content of a full KV cache block is now cached in one tier (device or host), and
    prompts can match it.

    The hash of a block is an xxh3_64 over the hash of the parent block and the tokens of the block.
    """

    block_hash: int
    parent_hash: int  # the root's own hash for a first block
    token_ids: tuple[int, ...]
    tier: Tier
    is_first: bool = False  # the block is the first of its prefix
    root: bytes = b""  # the digest of the root; only prompts with the same root can match


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A prefix cache event: one tier (device or host) has lost its last copy of a KV cache block's content."""

    block_hash: int
    tier: Tier
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """A prefix cache event: all content was removed from the cache, on the device and on the host."""


KvEvent = BlockStored | BlockRemoved | CacheCleared
KvEventCounts = Counter[type[KvEvent]]
