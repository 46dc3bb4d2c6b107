"""The data that goes into the core and comes out of it."""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from pagewire.common.wire.messages import GrammarKind, SamplingParams


class EarlyStopping(Enum):
    """When a beam search with enough hypotheses ends (the three values of transformers' `early_stopping`)."""

    HEURISTIC = 1  # False: when the best beam, at its present length, cannot beat the worst hypothesis
    FIRST = 2  # True: at once
    NEVER = 3  # "never": when no continuation of any length can


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search: the `Request.n` best of the hypotheses found are returned."""

    beam_width: int
    length_penalty: float = 1.0  # a hypothesis scores cumulative_logprob / num_output_tokens ** length_penalty
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class OutputMode(Enum):
    """How a request's output reaches its client."""

    STREAMED = "streamed"  # as it comes; that of a beam search is known only at its end
    WHOLE = "whole"  # at its end
    DETACHED = "detached"  # it is kept until a client asks


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must match. One of the end tokens ends it."""

    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]  # at least one, rising


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: everything is resolved, nothing is optional any more."""

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
    traceparent: str = ""  # W3C trace context, handed on to the worker
    output_mode: OutputMode = OutputMode.STREAMED
    grammar: Grammar | None = None  # what each of its outputs matches
    session_id: str = ""  # the conversation that it is part of, within its tenant; empty: found by its prefix
    will_return: bool | None = None  # whether a request will follow that begins with its prompt and output
    retention_seconds: int | None = None  # that its cached blocks are worth keeping, from 1

    @property
    def num_rows(self) -> int:
        """Rows of the worker that it may have at once."""
        return self.beam.beam_width if self.beam else self.n


class AdmissionReason(Enum):
    """Why a request is not taken."""

    INVALID = "invalid"  # can never run
    DUPLICATE = "duplicate"  # the tenant has a running request of this id
    QUEUE_FULL = "queue_full"  # try again later


class AdmissionError(Exception):
    """A request that `Scheduler.add` does not take. `field` names the field of the request at fault, or is empty."""

    def __init__(self, reason: AdmissionReason, field_name: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field_name


class EndReason(Enum):
    """Why a sequence ended. The first three reach the client as a finish reason, the others as a status."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    NAN_LOGITS = "nan_logits"  # INTERNAL
    OUT_OF_MEMORY = "out_of_memory"  # RESOURCE_EXHAUSTED: the worker's, while it computed this request alone
    CRASHES_WORKER = "crashes_worker"  # INTERNAL
    NO_LONGER_FITS = "no_longer_fits"  # RESOURCE_EXHAUSTED: the worker came back smaller
    NO_WORKER = "no_worker"  # UNAVAILABLE
    GRAMMAR_FAILED = "grammar_failed"  # INTERNAL
    GRAMMAR_DEAD_END = "grammar_dead_end"  # INVALID_ARGUMENT: the tokenizer has no tokens for what is to come
    GRAMMAR_LIMIT = "grammar_limit"  # RESOURCE_EXHAUSTED: what a step may take to tell what its grammar allows


@dataclass(frozen=True, slots=True)
class SequenceEnd:
    """The one terminal event of a sequence. Times are of the caller's clock, in seconds; None: never happened."""

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
    # In turn when its request was preempted, or lost its worker, and when it ran again; it may end in between.
    pauses: tuple[float, ...] = ()
    embedding: bytes = b""  # float32, little-endian; empty: none was asked for, or made


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, and which others were most likely in its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first, or this token and the listed ones


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The whole output of one sequence of a beam search, known only at its end."""

    sequence_id: int
    token_ids: tuple[int, ...]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """The outputs of an event for the clients.

    `sequence_ids[i]` got `token_ids[i]`; a sequence that got a token and ended stands in both. `logprobs` holds the
    sequences that asked for them. The hypotheses' tokens stand in `hypotheses` alone, and their ends in `ended`.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: list[SequenceEnd] = field(default_factory=list)


SESSION_AGES_S = (1.0, 10.0, 60.0, 300.0)  # upper bounds, in seconds; what is above the last stands behind it
NUM_SESSION_AGES = len(SESSION_AGES_S) + 1


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now and counters since start. Blocks are those of the worker that is there."""

    num_running: int  # sequences
    num_waiting: int
    num_swapped: int  # on their way to the host, there, or on their way back
    num_waiting_tokens: int
    num_device_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_host_blocks: int
    num_held_host_blocks: int
    num_cached_host_blocks: int
    num_preemptions: int  # of requests
    num_swap_preemptions: int  # of those, by swapping
    num_moved_blocks_out: int  # device to host: swaps and demotions
    num_moved_blocks_in: int
    num_prompt_tokens: int  # of sequences that first ran
    num_cached_prompt_tokens: int  # of those, found in the cache, in either tier
    num_host_cached_prompt_tokens: int  # of those, found in host blocks
    num_generation_tokens: int  # computed
    num_admitted_requests: int = 0  # that first ran
    num_overdue_requests: int = 0  # of those, served in order of arrival since they had waited too long
    # Prompt tokens of requests that went on with a session, which its earlier requests had computed: those that were
    # still cached, and those that were not. By how long the session was away, see SESSION_AGES_S.
    num_kept_session_tokens: tuple[int, ...] = (0,) * NUM_SESSION_AGES
    num_lost_session_tokens: tuple[int, ...] = (0,) * NUM_SESSION_AGES
    num_discarded_tokens: int = 0  # of those computed, such as beam searches did not return


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """A holder of device blocks. It has no name if it is a request of another tenant than the one who asks."""

    request_id: str | None
    num_blocks: int


@dataclass(frozen=True, slots=True)
class RequestReport:
    """A report of what a request is doing and why it waits."""

    request_id: str
    tenant: str
    state: str  # waiting, running, swapping_out, swapped, swapping_in
    reason: str  # one sentence; empty while it runs freely
    queue_position: int | None  # from 1, while it waits to run
    num_prompt_tokens: int
    num_output_tokens: int  # of all its sequences
    num_computed_tokens: int
    num_sequences: int  # that have not ended
    num_running_sequences: int
    num_held_blocks: int
    num_held_host_blocks: int
    num_wanted_blocks: int  # to run, or to run on
    num_free_blocks: int
    num_preemptions: int
    holders: tuple[BlockHolder, ...]  # most blocks first
    arrived_at: float


class BlockUse(IntEnum):
    """The use of a block. Values from HELD on name an owner: HELD + its index in `BlockMap.owners`."""

    FREE = 0
    CACHED = 1  # idle, its content can be matched
    MOVING = 2  # only a move that is under way holds it
    SHARED = 3  # by several requests
    HELD = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Every block of both pools. Entry i is about block i + 1."""

    owners: tuple[str, ...]  # request ids
    device: tuple[int, ...]  # BlockUse
    host: tuple[int, ...]


class Tier(Enum):
    """The tier of memory that holds a copy of a block's content."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block's content can be matched. Hashes are chained xxh3_64 over the parent's hash and the tokens."""

    block_hash: int
    parent_hash: int  # the root's own where the block is the first
    token_ids: tuple[int, ...]
    tier: Tier
    is_first: bool = False  # of its prefix
    root: bytes = b""  # the digest of the root of all that can hit it


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last copy of a content in this tier is gone."""

    block_hash: int
    tier: Tier
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is cached any more, in either tier."""


KvEvent = BlockStored | BlockRemoved | CacheCleared
KvEventCounts = Counter[type[KvEvent]]
