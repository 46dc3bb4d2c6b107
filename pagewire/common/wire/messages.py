"""The messages between the scheduler and a worker, as frozen data: what either service makes, the other takes.

`worker_wire.py` translates them to and from `pagewire.worker.v1`, whose comments give units and ranges.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Any

# Rises with every change of meaning. Both sides must speak the same one.
PROTOCOL_VERSION = 8


class WorkerProtocolError(Exception):
    """The other side broke the worker protocol. The session must end; the text says what was expected and what came."""


def _legal(default: Any, is_legal: Callable[[Any], bool]) -> Any:
    """A field, with what its values must fulfil; NaN fulfils none of it."""
    return field(default=default, metadata={"is_legal": is_legal})


def illegal_values(message: Any) -> Iterator[tuple[str, Any]]:
    """Find the fields whose values are out of range, each with its value."""
    return (
        (name, value) for name, is_legal in _limits(message.__class__) if not is_legal(value := getattr(message, name))
    )


@cache
def _limits(kind: type) -> list[tuple[str, Callable[[Any], bool]]]:
    return [(each.name, each.metadata["is_legal"]) for each in fields(kind) if "is_legal" in each.metadata]


def _column(phase: str) -> Any:
    """A column of a plan's phase: the i-th entries of all its columns belong together."""
    return field(default=(), metadata={"phase": phase})


class Pooling(Enum):
    """What an embedding is made of: the final hidden states of a row's tokens, scaled to length 1."""

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row chooses its tokens. Every value is explicit: defaults were resolved before."""

    temperature: float = _legal(0.0, lambda value: 0.0 <= value < math.inf)  # 0 is greedy
    top_k: int = _legal(0, lambda value: value >= 0)  # 0 is off
    top_p: float = _legal(1.0, lambda value: 0.0 < value <= 1.0)
    min_p: float = _legal(0.0, lambda value: 0.0 <= value <= 1.0)
    repetition_penalty: float = _legal(1.0, lambda value: 0.0 < value < math.inf)
    presence_penalty: float = _legal(0.0, math.isfinite)
    frequency_penalty: float = _legal(0.0, math.isfinite)
    logit_bias_token_ids: tuple[int, ...] = ()
    logit_bias_values: tuple[float, ...] = _legal((), lambda values: not any(map(math.isnan, values)))
    min_tokens: int = _legal(0, lambda value: value >= 0)
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = _legal(None, lambda value: value is None or value >= 0)
    num_prompt_logprobs: int | None = _legal(None, lambda value: value is None or value >= 0)
    # The num_logprobs tokens that are reported in place of the most likely ones; empty: the most likely ones.
    logprob_token_ids: tuple[int, ...] = ()
    # A row of a beam: it reports its most likely tokens instead of choosing one, and waits to be told how it goes on.
    num_candidates: int | None = _legal(None, lambda value: value is None or value >= 1)
    # Any other: the row reports an embedding instead of choosing a token.
    pooling: Pooling = field(default=Pooling.NONE, metadata={"is_legal": lambda value: isinstance(value, Pooling)})

    @property
    def chooses_tokens(self) -> bool:
        return self.num_candidates is None and self.pooling is Pooling.NONE


class GrammarKind(Enum):
    """The form in which a grammar's text is written."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4  # a JSON array of texts
    GRAMMAR = 5  # Lark or EBNF
    STRUCTURAL_TAG = 6


@dataclass(frozen=True, slots=True)
class AddedGrammar:
    """What an output must match, and the number by which an epoch knows it, from 1. One of the end tokens ends it."""

    grammar_id: int
    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]  # at least one, rising


@dataclass(frozen=True, slots=True)
class RowOpening:
    """A sequence moves into a slot."""

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    sample_index: int
    traceparent: str = ""
    grammar_id: int = 0  # 0: its output may be anything


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    Its phases are carried out in order, all reads of a phase before its writes: released slots, released
    and added grammars, moves, copies, openings, forks, appended blocks, set blocks, appended tokens, work."""

    epoch: int
    step: int
    released_slots: tuple[int, ...] = ()
    # Moves: device block swap_out_device_blocks[i] to host block swap_out_host_blocks[i], and the other way round.
    swap_out_device_blocks: tuple[int, ...] = _column("swaps_out")
    swap_out_host_blocks: tuple[int, ...] = _column("swaps_out")
    swap_in_host_blocks: tuple[int, ...] = _column("swaps_in")
    swap_in_device_blocks: tuple[int, ...] = _column("swaps_in")
    # Copies from device block to device block.
    copy_source_blocks: tuple[int, ...] = _column("copies")
    copy_target_blocks: tuple[int, ...] = _column("copies")
    openings: tuple[RowOpening, ...] = ()
    # Slot fork_target_slots[i] becomes a copy of row fork_source_slots[i], and is paused. A target may be occupied.
    fork_source_slots: tuple[int, ...] = _column("forks")
    fork_target_slots: tuple[int, ...] = _column("forks")
    append_slots: tuple[int, ...] = _column("appended_blocks")
    append_block_ids: tuple[int, ...] = _column("appended_blocks")
    # Entry set_block_indexes[i] of the table of slot set_block_slots[i] becomes set_block_ids[i].
    set_block_slots: tuple[int, ...] = _column("set_blocks")
    set_block_indexes: tuple[int, ...] = _column("set_blocks")
    set_block_ids: tuple[int, ...] = _column("set_blocks")
    append_token_slots: tuple[int, ...] = _column("appended_tokens")
    append_token_ids: tuple[int, ...] = _column("appended_tokens")
    work_slots: tuple[int, ...] = _column("patches_of_work")
    work_num_tokens: tuple[int, ...] = _column("patches_of_work")
    added_grammars: tuple[AddedGrammar, ...] = ()
    released_grammar_ids: tuple[int, ...] = ()


def _phases() -> dict[str, tuple[str, ...]]:
    phases: dict[str, tuple[str, ...]] = {}
    for each in fields(StepPlan):
        if each.default == ():
            phase = each.metadata.get("phase", each.name)
            phases[phase] = (*phases.get(phase, ()), each.name)
    return phases


PHASES = _phases()  # the names of each phase's columns


class RowStatus(Enum):
    """Whether a row was computed, and why not."""

    OK = 1
    NAN_LOGITS = 2
    OUT_OF_MEMORY = 3
    GRAMMAR_FAILED = 4  # it refuses a token of the row
    GRAMMAR_LIMIT = 5  # what it allows takes more than a step may
    LATE = 6  # what it allows was not known in time: it computes its last token again, and samples then
    GRAMMAR_DEAD_END = 7  # it allows no token behind those of the row


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Columns over positions; each position has as many top entries as its row asked for."""

    chosen: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns over the rows of beams: each row has as many entries as it asked for, or as its grammar allows, most
    likely first."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()  # of each row's entries


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt tokens from `first_position` on, computed by one chunk of a row."""

    slot: int
    first_position: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class StepParts:
    """Microseconds of a step on the worker, by what it did. What it does not tell apart is the model's."""

    plan_us: int = 0
    batch_us: int = 0
    products_us: int = 0
    attention_us: int = 0
    norms_us: int = 0
    rotary_us: int = 0
    model_us: int = 0
    head_us: int = 0
    sampling_us: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Its rows are the sampling rows of the plan, in slot order."""

    epoch: int
    step: int
    statuses: tuple[RowStatus, ...] = ()  # empty: every row is OK
    token_ids: tuple[int, ...] = ()  # one per row that is OK and chooses a token
    logprobs: Logprobs = Logprobs()
    candidates: Candidates = Candidates()  # of the rows that are OK and report candidates
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    duration_us: int = 0
    last_moved_step: int = 0  # the moves of all plans up to this step are done
    parts: StepParts = StepParts()
    embeddings: tuple[bytes, ...] = ()  # one per row that is OK and has pooling: float32, little-endian
    # What it took to tell which tokens the grammar of a sampling row allows, in microseconds of row mask_slots[i]. Of a
    # row that is late it is told by the step in which that is known.
    mask_slots: tuple[int, ...] = ()
    mask_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """A grammar that was added is ready, or `error` says why it never will be."""

    epoch: int
    grammar_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens an epoch."""

    protocol_version: int
    instance_id: str
    epoch: int
    pipeline_depth: int


_COUNT = {"is_legal": lambda value: value >= 1}


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The capacity that a worker reports when an epoch begins."""

    worker_id: str
    model_digest: bytes
    vocab_size: int = field(metadata=_COUNT)
    max_model_len: int = field(metadata=_COUNT)
    block_size: int = field(metadata=_COUNT)
    num_device_blocks: int = field(metadata=_COUNT)  # usable ones; their ids are 1..num_device_blocks
    block_bytes: int
    max_num_seqs: int = field(metadata=_COUNT)
    max_num_batched_tokens: int = field(metadata=_COUNT)
    device: str
    dtype: str
    attention_backend: str
    num_host_blocks: int = 0  # their ids are 1..num_host_blocks
    swap_bandwidth: float = 0.0  # bytes per second between device and host, measured; 0 without host blocks
    sliding_window: int = 0  # the widest window of all layers, in tokens; 0 if one has none
    tensor_parallel_rank: int = 0
    # Ranks that share the model out; each says `block_bytes` and `weight_bytes` of its own part.
    tensor_parallel_size: int = field(default=1, metadata=_COUNT)
    quantization: str = ""  # what the weights were made into while they loaded
    grammar_version: str = ""  # of the library that reads grammars; empty: rows have none
    gates_grammars: bool = False  # rows with a grammar rest when they have sampled
    tables_digest: str = ""  # SHA-256 over what was computed of the model's configuration as it loaded
    weight_format: str = ""  # in words
    weight_bytes: int = 0  # that the model takes


@dataclass(frozen=True, slots=True)
class WorkerStarting:
    """A worker that is there and will be ready. Another text shows that it has come further."""

    doing: str

    def __str__(self) -> str:
        return f"the worker is still starting, {self.doing}"


class RefusalReason(Enum):
    """Why a worker does not serve an epoch."""

    STALE_EPOCH = 1
    PROTOCOL_VERSION = 2
    FUTURE_EPOCH = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the worker does not serve an epoch, and who holds it."""

    reason: RefusalReason
    epoch: int
    instance_id: str
    message: str


@dataclass(frozen=True, slots=True)
class CertificateLife:
    """The seconds of Unix time between which a certificate of the worker is good, and the flag of its file."""

    flag: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """How far the worker is, whatever it is doing."""

    epoch: int
    last_started_step: int
    last_finished_step: int
    last_moved_step: int = 0
    certificates: tuple[CertificateLife, ...] = ()
