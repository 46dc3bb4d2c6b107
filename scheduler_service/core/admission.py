"""Admission control: rejects requests that can never run, and requests that exceed the limits of the waiting queue."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.cache import CacheManager
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import AdmissionError, AdmissionReason, Request
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.core.worker_state import WorkerState


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on the size of a request, and the largest number of tokens in a step. They come from the scheduler's
    options, or from the connected worker if its limits are tighter."""

    max_sequence_tokens: int  # prompt and output of one sequence
    num_step_tokens: int  # the token budget of a step
    max_rows: int
    grammar_version: str  # version of the grammar library on the worker
    pool: str = ""  # a description of the block pool, if the pool limits the length of sequences
    # Returns the invalid field and an error message if the pool can never hold the request; empty strings otherwise.
    lacks_blocks: Callable[[Request], tuple[str, str]] = lambda request: ("", "")


class Admission:
    """Decides whether a new request is admitted to the waiting queue. It applies the limits of the scheduler's options,
    and the tighter limits of a connected worker."""

    def __init__(self, state: Lifecycle, options: SchedulerOptions) -> None:
        self._state = state
        self._options = options
        self._own = self.limits = RequestLimits(
            options.max_model_len or sys.maxsize,
            options.max_num_batched_tokens,
            options.max_num_seqs,
            options.grammar_version,
        )

    def num_slots(self, capacity: WorkerCapacity) -> int:
        """Return how many sequences may run on a worker at the same time.

        The number is at most the token budget of a step, because each decoding sequence uses one token of every step.
        With more sequences, some would never be scheduled.
        """
        own = self._own
        return min(own.max_rows, capacity.max_num_seqs, own.num_step_tokens, capacity.max_num_batched_tokens)

    def join(self, worker: WorkerState) -> None:
        """Apply the limits of a newly connected worker to all later requests.

        A sequence may be at most as long as the model allows. It must also fit into the worker's KV cache blocks. If
        all layer groups have a sliding window and the pool can hold one of each, only the model's length counts. A
        prompt of a bidirectional model must fit into one step.
        """
        own, capacity, cache = self._own, worker.capacity, worker.cache
        max_tokens = min(own.max_sequence_tokens, capacity.max_model_len)
        if (max_blocks := cache.room.max_sequence_blocks) is not None:
            max_tokens = min(max_tokens, max_blocks * capacity.block_size + 1)
        reason, num_step_tokens = _describe_pool(cache), min(own.num_step_tokens, capacity.max_num_batched_tokens)
        if capacity.is_bidirectional and num_step_tokens < max_tokens - 1:
            max_tokens = num_step_tokens + 1
            reason = f"this model computes a prompt in one step, of --max-num-batched-tokens {num_step_tokens}"
        self.limits = RequestLimits(
            max_tokens,
            num_step_tokens,
            worker.rows.slots.num_slots,
            capacity.grammar_version,
            f" ({reason})" if max_tokens < own.max_sequence_tokens else "",
            partial(_lacks_blocks, cache),
        )

    def lose(self) -> None:
        """Apply only the limits of the scheduler's options again, because the worker was lost."""
        self.limits = self._own

    def check(self, request: Request) -> None:
        """Check whether a new request can be admitted to the waiting queue. Raises AdmissionError if not.

        The reason is DUPLICATE if the tenant has an unfinished request with this id, INVALID if the request can never
        run, and QUEUE_FULL if the queue is full.
        """
        if (request.tenant, request.request_id) in self._state.groups:
            raise AdmissionError(
                AdmissionReason.DUPLICATE, "request_id", f"request {request.request_id!r} is running already"
            )
        field, message = self.rejection(request)
        if message:
            raise AdmissionError(AdmissionReason.INVALID, field, message)
        waiting, options = self._state.waiting, self._options
        num_sequences = 1 if request.beam else request.n
        limits = [("", waiting.num_sequences, options.max_waiting_requests)]
        if options.max_tenant_waiting_requests is not None:
            num_waiting = waiting.num_tenant_sequences(request.tenant)
            limits.append((" of this tenant", num_waiting, options.max_tenant_waiting_requests))
        for whose, num_waiting, limit in limits:
            if num_waiting + num_sequences > limit:
                raise AdmissionError(
                    AdmissionReason.QUEUE_FULL,
                    "",
                    f"{num_waiting} sequences{whose} are queued, the limit is {limit}; try again later",
                )
        num_tokens = waiting.num_prompt_tokens + len(request.prompt_token_ids)
        if waiting.num_sequences and num_tokens > options.max_waiting_tokens:
            raise AdmissionError(
                AdmissionReason.QUEUE_FULL,
                "",
                f"{waiting.num_prompt_tokens} prompt tokens are queued, with this request {num_tokens}, "
                f"the limit is {options.max_waiting_tokens}; try again later",
            )

    def _grammar_fault(self) -> str:
        """Return the reason why this server cannot run requests with a grammar, or an empty string if it can."""
        ours, theirs = self._own.grammar_version, self.limits.grammar_version
        if ours and theirs == ours:
            return ""
        return (
            f"this server does not support structured output: the scheduler has llguidance version "
            f"{ours or 'none'}, the worker has {theirs or 'none'}"
        )

    def rejection(self, request: Request) -> tuple[str, str]:
        """Check whether a request can ever run on this server. If not, return the invalid field and an error message.
        Otherwise return two empty strings."""
        if request.grammar is not None and (fault := self._grammar_fault()):
            return "sampling.structured_output", fault
        limits, num_prompt_tokens = self.limits, len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + max(1, request.max_tokens)  # embeddings need one too
        if num_tokens > limits.max_sequence_tokens:
            return (
                "prompt" if num_prompt_tokens >= limits.max_sequence_tokens else "sampling.max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {request.max_tokens}: together "
                f"{num_tokens}, this server allows {limits.max_sequence_tokens}{limits.pool}; shorten the prompt or "
                "lower max_tokens",
            )
        width = request.beam.beam_width if request.beam else 1
        if width > limits.max_rows:
            return (
                "sampling.beam_width",
                f"beam_width is {width}, but this server runs at most {limits.max_rows} sequences at a time; lower it",
            )
        return limits.lacks_blocks(request)


def _lacks_blocks(cache: CacheManager, request: Request) -> tuple[str, str]:
    """Check whether the worker has enough KV cache blocks for a request. If not, return the invalid field and an error
    message. Otherwise return two empty strings."""
    num_blocks = cache.room.max_request_blocks(request)
    num_states = cache.states.max_request_states(request) if cache.states.num_states else 0
    if num_states > cache.states.num_states:
        return (
            "sampling.beam_width" if request.beam else "prompt",
            f"the request may need {num_states} states of linear attention or convolutions at a time, the worker has "
            f"{cache.states.num_states}; lower beam_width, or give the worker more memory for the KV cache",
        )
    if num_blocks <= cache.pool.num_blocks:
        return "", ""
    what = "beam_width" if request.beam else "n"
    return (
        f"sampling.{what}",
        f"with {what} {request.num_rows} the request may need {num_blocks} blocks of "
        f"{cache.block_size} tokens, the worker has {cache.pool.num_blocks}; lower {what} or max_tokens",
    )


def _describe_pool(cache: CacheManager) -> str:
    """Return a description of the size of the worker's block pool for error messages. If the pool is too small
    for one sliding window, the description includes the number of blocks for a window."""
    text, windows = f"the worker has {cache.pool.num_blocks} blocks of {cache.block_size} tokens", cache.room.windows
    if windows.of_groups == (0,) or cache.room.max_sequence_blocks is None:
        return text
    if len(windows.of_groups) > 1:
        return f"{text} for {len(windows.of_groups)} layer groups"
    window = windows.of_groups[0]
    return f"{text}, the window of {window} tokens needs {cache.room.num_chunk_blocks(window, 1)}"
