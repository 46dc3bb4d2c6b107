"""What goes into the core and what comes out of it."""

from dataclasses import dataclass, field
from enum import Enum

from scheduler_service.core.plan import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: everything is resolved, nothing is optional any more."""

    request_id: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int = 0
    n: int = 1  # samples, one sequence each
    priority: int = 0  # lower runs first
    cache_salt: str = ""


class AdmissionReason(Enum):
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
    CRASHES_WORKER = "crashes_worker"  # INTERNAL
    NO_LONGER_FITS = "no_longer_fits"  # RESOURCE_EXHAUSTED: the worker came back smaller
    NO_WORKER = "no_worker"  # UNAVAILABLE


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What an event produced for the clients.

    `sequence_ids[i]` got `token_ids[i]`; a sequence that got a token and ended stands in both. `logprobs` holds the
    sequences that asked for them.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: list[SequenceEnd] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now and counters since start."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_device_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_prompt_tokens: int  # of sequences that first ran
    num_cached_prompt_tokens: int  # of those, found in the cache
    num_generation_tokens: int
