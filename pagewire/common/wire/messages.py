"""The messages between the scheduler and a worker, as frozen dataclasses.

`worker_wire.py` translates them to and from `pagewire.worker.v1`, whose comments specify units and ranges.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from itertools import accumulate
from typing import Any

# Incremented with every change of the protocol's meaning. Both sides must use the same version.
PROTOCOL_VERSION = 12
# Moves name state i as block FIRST_STATE_ID + i, on the device and on the host.
FIRST_STATE_ID = 1 << 31


class WorkerProtocolError(Exception):
    """The other side of the link between scheduler and worker violated the protocol, so the session must end. The error
    message says what was expected and what was received.
    """


def _legal(default: Any, is_legal: Callable[[Any], bool]) -> Any:
    """Return a dataclass field with a default and a range check. `is_legal` returns whether a value of the field is in
    range. It must return False for NaN.
    """
    return field(default=default, metadata={"is_legal": is_legal})


def illegal_values(message: Any) -> Iterator[tuple[str, Any]]:
    """Return an iterator over the fields of a message whose value is out of range. Each entry is the name of the field
    and its value.
    """
    return (
        (name, value) for name, is_legal in _limits(message.__class__) if not is_legal(value := getattr(message, name))
    )


@cache
def _limits(kind: type) -> list[tuple[str, Callable[[Any], bool]]]:
    return [(each.name, each.metadata["is_legal"]) for each in fields(kind) if "is_legal" in each.metadata]


def _column(phase: str) -> Any:
    """Return a dataclass field of a step plan that is one column of a table. `phase` is the name of the table. The i-th
    entries of all columns of a table describe the same item.
    """
    return field(default=(), metadata={"phase": phase})


class Pooling(Enum):
    """The method by which a worker computes an embedding from the final hidden states of a sequence's tokens.
    Embeddings are normalized to length 1.
    """

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling options of one sequence, as the scheduler sends them to the worker. Every value is explicit: the
    scheduler has already filled in defaults.
    """

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
    # The tokens to report log-probabilities for, num_logprobs of them; empty: the most likely tokens.
    logprob_token_ids: tuple[int, ...] = ()
    # If set, the row belongs to a beam: it reports its most likely tokens and chooses none. It then waits until the
    # scheduler appends a token or forks it.
    num_candidates: int | None = _legal(None, lambda value: value is None or value >= 1)
    # If not NONE, the row reports an embedding instead of choosing a token.
    pooling: Pooling = field(default=Pooling.NONE, metadata={"is_legal": lambda value: isinstance(value, Pooling)})


class GrammarKind(Enum):
    """The kind of a grammar that constrains an output. The kind determines the syntax of the grammar's text."""

    JSON_SCHEMA = 1
    JSON_OBJECT = 2
    REGEX = 3
    CHOICE = 4  # a JSON array of texts
    GRAMMAR = 5  # Lark or EBNF
    STRUCTURAL_TAG = 6


@dataclass(frozen=True, slots=True)
class AddedGrammar:
    """A grammar that the scheduler sends to the worker, so that outputs can be constrained to match it. `grammar_id`
    counts from 1 in each epoch (one pairing of a scheduler and a worker). An output ends with one of the end tokens.
    """

    grammar_id: int
    kind: GrammarKind
    text: str
    end_token_ids: tuple[int, ...]  # at least one, in ascending order


@dataclass(frozen=True, slots=True)
class RowOpening:
    """An instruction in a step plan to start or resume a sequence. The worker creates a row (its state of one running
    sequence) in the free slot `slot`.
    """

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]  # the block tables of all layer groups, one after another
    sampling: SamplingParams
    seed: int
    sample_index: int
    traceparent: str = ""
    grammar_id: int = 0  # 0: the output is not constrained
    table_lengths: tuple[int, ...] = ()  # one per layer group; empty: a single group
    # Of a model with states: the device state with which the row starts (0: zeros), and the states that it writes. A
    # row whose last position may be computed again writes two in turn.
    read_state: int = 0
    own_states: tuple[int, ...] = ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The block table of each layer group."""
        if not self.table_lengths:
            return (self.block_ids,)
        ends = tuple(accumulate(self.table_lengths))
        return tuple(self.block_ids[end - length : end] for end, length in zip(ends, self.table_lengths, strict=True))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's instructions to the worker for one step.

    The worker executes the instructions in phases, in this order: released slots, released and added grammars, moves
    between device and host, copies, row openings, forks, appended blocks, set blocks, appended tokens, work. Within a
    phase, all reads come before all writes.
    """

    epoch: int
    step: int
    released_slots: tuple[int, ...] = ()
    # Moves: device block swap_out_device_blocks[i] to host block swap_out_host_blocks[i]; swaps in go the other way.
    swap_out_device_blocks: tuple[int, ...] = _column("swaps_out")
    swap_out_host_blocks: tuple[int, ...] = _column("swaps_out")
    swap_in_host_blocks: tuple[int, ...] = _column("swaps_in")
    swap_in_device_blocks: tuple[int, ...] = _column("swaps_in")
    # Copies from device block to device block.
    copy_source_blocks: tuple[int, ...] = _column("copies")
    copy_target_blocks: tuple[int, ...] = _column("copies")
    openings: tuple[RowOpening, ...] = ()
    # Slot fork_target_slots[i] becomes a paused copy of row fork_source_slots[i]. A target may be occupied.
    fork_source_slots: tuple[int, ...] = _column("forks")
    fork_target_slots: tuple[int, ...] = _column("forks")
    # The block table of layer group g of the row in slot s has the number g * max_num_seqs + s.
    append_tables: tuple[int, ...] = _column("appended_blocks")
    append_block_ids: tuple[int, ...] = _column("appended_blocks")
    # Entry set_block_indexes[i] of table set_block_tables[i] becomes set_block_ids[i].
    set_block_tables: tuple[int, ...] = _column("set_blocks")
    set_block_indexes: tuple[int, ...] = _column("set_blocks")
    set_block_ids: tuple[int, ...] = _column("set_blocks")
    # The row in slot set_state_slots[i], which a fork has just created, writes these states in turn.
    set_state_slots: tuple[int, ...] = _column("set_states")
    set_state_firsts: tuple[int, ...] = _column("set_states")
    set_state_seconds: tuple[int, ...] = _column("set_states")
    # The state of row save_slots[i] after its first save_positions[i] tokens is also written to device state
    # save_states[i] while the step passes this position. Rows in later plans may read it.
    save_slots: tuple[int, ...] = _column("saves")
    save_positions: tuple[int, ...] = _column("saves")
    save_states: tuple[int, ...] = _column("saves")
    append_token_slots: tuple[int, ...] = _column("appended_tokens")
    append_token_ids: tuple[int, ...] = _column("appended_tokens")
    work_slots: tuple[int, ...] = _column("patches_of_work")
    work_num_tokens: tuple[int, ...] = _column("patches_of_work")
    added_grammars: tuple[AddedGrammar, ...] = ()
    released_grammar_ids: tuple[int, ...] = ()
    # The lease: after this step, the worker computes this many further steps, as if it had received an empty plan for
    # each. Their results have the next step numbers, and the next plan has the number after them.
    num_leased_steps: int = 0
    ends_lease: bool = False  # the lease of the previous plan ends with the step that the worker computes now


def _phases() -> dict[str, tuple[str, ...]]:
    phases: dict[str, tuple[str, ...]] = {}
    for each in fields(StepPlan):
        if each.default == ():
            phase = each.metadata.get("phase", each.name)
            phases[phase] = (*phases.get(phase, ()), each.name)
    return phases


PHASES = _phases()  # the names of the columns of each phase


class RowStatus(Enum):
    """The outcome of a step for one row (a running sequence): OK if the row was computed, else the reason why it was
    not.
    """

    OK = 1
    NAN_LOGITS = 2
    OUT_OF_MEMORY = 3
    GRAMMAR_FAILED = 4  # the grammar refuses a token of the row
    GRAMMAR_LIMIT = 5  # the mask of allowed tokens needs more work than a step may use
    LATE = 6  # the mask was not ready in time; the row recomputes its last token in a later step and samples then
    GRAMMAR_DEAD_END = 7  # the grammar allows no token after the row's tokens


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the tokens at several positions, stored as columns. `chosen` and `ranks` have one entry per
    position. The other columns have, for each position, the number of most likely tokens that the sequence requested.
    """

    chosen: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely next tokens of sequences in beam search, in descending order of probability. Each column has the
    entries of all sequences in turn.

    A sequence has the number of candidates that it requested, or fewer if its grammar allows fewer tokens.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()  # the number of entries of each row


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a sequence's prompt tokens from `first_position` on, computed by one prefill chunk."""

    slot: int
    first_position: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class StepParts:
    """The time in microseconds that the worker spent on each part of a step. model_us includes all time that belongs to
    no other part.
    """

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
    """The worker's result of one step. The result covers the rows (running sequences) that sample a token in this step,
    in slot order.
    """

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
    # The time to compute the mask of allowed tokens, in microseconds for row mask_slots[i]. For a row that is late, the
    # step in which its mask is complete reports the time.
    mask_slots: tuple[int, ...] = ()
    mask_us: tuple[int, ...] = ()
    num_dropped_steps: int = 0  # the later steps of a lease that has ended early: they are not computed


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of consecutive steps of one lease, in one message."""

    results: tuple[StepResult, ...] = ()


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """The worker's report that a grammar is ready for use, or that it never will be. `error` gives the reason, and is
    empty if the grammar is ready.
    """

    epoch: int
    grammar_id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Hello:
    """The message with which the scheduler begins an epoch (one pairing of a scheduler and a worker)."""

    protocol_version: int
    instance_id: str
    epoch: int
    pipeline_depth: int


_COUNT = {"is_legal": lambda value: value >= 1}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of the model whose KV cache has the same lifetime. A sequence has one block table for each layer group. A
    block holds the keys and values of all layers of one group.
    """

    sliding_window: int = 0  # positions that any of the layers reads, including the query's own; 0: all
    num_layers: int = 0


def _are_ordered(groups: tuple[LayerGroup, ...]) -> bool:
    windows = [group.sliding_window or math.inf for group in groups]
    return windows != [] and windows == sorted(windows, reverse=True)


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """The capacity and properties that a worker reports to the scheduler when an epoch (one pairing of a scheduler and
    a worker) begins.
    """

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
    tensor_parallel_rank: int = 0
    # The number of ranks that share the model; each reports `block_bytes` and `weight_bytes` of its own part.
    tensor_parallel_size: int = field(default=1, metadata=_COUNT)
    quantization: str = ""  # the format to which the weights were quantized at load time
    grammar_version: str = ""  # of the grammar library; empty: grammars are not supported
    gates_grammars: bool = False  # rows with a grammar pause after they have sampled
    tables_digest: str = ""  # SHA-256 of the tables computed from the model's configuration at load time
    weight_format: str = ""  # a description
    weight_bytes: int = 0  # the memory of the model's weights
    is_bidirectional: bool = False  # tokens attend to later tokens, too: prompts are computed whole, and never cached
    # At least one group. The group with the longest reach comes first.
    layer_groups: tuple[LayerGroup, ...] = field(default=(LayerGroup(),), metadata={"is_legal": _are_ordered})
    # Of a model whose sequences have a state besides K and V. States are numbered from 1 in each tier.
    num_device_states: int = 0  # 0: the model has no states
    num_host_states: int = 0
    state_bytes: int = 0
    num_state_layers: int = 0
    max_leased_steps: int = 0  # the limit on the leased steps of a plan; 0: no leases

    @property
    def windows(self) -> tuple[int, ...]:
        """The sliding window of each layer group, in tokens; 0: none."""
        return tuple(group.sliding_window for group in self.layer_groups)


@dataclass(frozen=True, slots=True)
class WorkerStarting:
    """A worker's report that it is running but not ready yet. A change of `doing` shows that the worker has made
    progress.
    """

    doing: str

    def __str__(self) -> str:
        return f"the worker is still starting, {self.doing}"


class RefusalReason(Enum):
    """The reason why a worker refuses to begin an epoch (one pairing of a scheduler and a worker)."""

    STALE_EPOCH = 1
    PROTOCOL_VERSION = 2
    FUTURE_EPOCH = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """The message with which a worker refuses to begin an epoch (one pairing of a scheduler and a worker). `epoch` is
    the last epoch that the worker has seen, and `instance_id` is the scheduler instance that began it.
    """

    reason: RefusalReason
    epoch: int
    instance_id: str
    message: str


@dataclass(frozen=True, slots=True)
class CertificateValidity:
    """The validity period of one of the worker's TLS certificates, in seconds of Unix time. `flag` is the command line
    flag that names the certificate's file.
    """

    flag: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A report of the worker's progress, which the worker sends to the scheduler regularly, even while a step runs."""

    epoch: int
    last_started_step: int
    last_finished_step: int
    last_moved_step: int = 0
    certificates: tuple[CertificateValidity, ...] = ()
