"""Which requests are taken at all: those that can run on what is there, while the queue has room."""

from pagewire.common.messages import WorkerCapacity
from scheduler_service.core.cache_manager import CacheManager
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import AdmissionError, AdmissionReason, Request


class Admission:
    """Checks requests against the scheduler's own limits, and a worker's tighter ones while it is there."""

    def __init__(
        self,
        state: Lifecycle,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        max_tenant_waiting_requests: int | None,
        grammar_version: str,
    ) -> None:
        self._state = state
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_waiting_requests = max_waiting_requests
        self._max_waiting_tokens = max_waiting_tokens
        self._max_tenant_waiting_requests = max_tenant_waiting_requests
        self._grammar_version = grammar_version

    @property
    def num_step_tokens(self) -> int:
        """The token budget of a step."""
        epoch = self._state.epoch
        return min(self._max_num_batched_tokens, epoch.capacity.max_num_batched_tokens if epoch else 2**31)

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have: the model's length bounds it, and the whole pool unless a
        window fits into that."""
        if self._state.epoch is None:
            return self._max_model_len
        capacity, cache = self._state.epoch.capacity, self._state.epoch.cache
        max_model_len = min(self._max_model_len, capacity.max_model_len)
        if cache.window and cache.num_chunk_blocks(1) <= capacity.num_device_blocks:
            return max_model_len
        return min(max_model_len, capacity.num_device_blocks * capacity.block_size + 1)

    def num_slots(self, capacity: WorkerCapacity) -> int:
        """Rows that a worker may have. A decoding row takes a token of every step: with more rows than a step has
        tokens, some would never have their turn."""
        return min(
            self._max_num_seqs,
            capacity.max_num_seqs,
            self._max_num_batched_tokens,
            capacity.max_num_batched_tokens,
        )

    def check(self, request: Request) -> None:
        """Raise AdmissionError for a request that is not taken."""
        if (request.tenant, request.request_id) in self._state.groups:
            raise AdmissionError(
                AdmissionReason.DUPLICATE, "request_id", f"request {request.request_id!r} is running already"
            )
        field, message = self.misfit(request)
        if message:
            raise AdmissionError(AdmissionReason.INVALID, field, message)
        waiting = self._state.waiting
        num_sequences = 1 if request.beam else request.n
        limits = [("", waiting.num_sequences, self._max_waiting_requests)]
        if self._max_tenant_waiting_requests is not None:
            num_waiting = waiting.num_tenant_sequences(request.tenant)
            limits.append((" of this tenant", num_waiting, self._max_tenant_waiting_requests))
        for whose, num_waiting, limit in limits:
            if num_waiting + num_sequences > limit:
                raise AdmissionError(
                    AdmissionReason.QUEUE_FULL,
                    "",
                    f"{num_waiting} sequences{whose} are queued, the limit is {limit}; try again later",
                )
        num_tokens = waiting.num_prompt_tokens + len(request.prompt_token_ids)
        if waiting.num_sequences and num_tokens > self._max_waiting_tokens:
            raise AdmissionError(
                AdmissionReason.QUEUE_FULL,
                "",
                f"{waiting.num_prompt_tokens} prompt tokens are queued, with this request {num_tokens}, "
                f"the limit is {self._max_waiting_tokens}; try again later",
            )

    def _grammar_fault(self) -> str:
        """Why no request may have a grammar. Empty if they may."""
        epoch = self._state.epoch
        theirs = self._grammar_version if epoch is None else epoch.capacity.grammar_version
        if self._grammar_version and theirs == self._grammar_version:
            return ""
        return (
            f"this server takes no structured output: the scheduler reads grammars by version "
            f"{self._grammar_version or 'none'} of llguidance, the worker by {theirs or 'none'}"
        )

    def misfit(self, request: Request) -> tuple[str, str]:
        """Why the request can never run: the field at fault and the message. Empty if it can."""
        if request.grammar is not None and (fault := self._grammar_fault()):
            return "sampling.structured_output", fault
        epoch, max_sequence_tokens = self._state.epoch, self.max_sequence_tokens
        num_prompt_tokens = len(request.prompt_token_ids)
        num_tokens = num_prompt_tokens + max(1, request.max_tokens)  # a prompt that is embedded leaves room for one too
        if num_tokens > max_sequence_tokens:
            limit = f"this server allows {max_sequence_tokens}"
            if epoch is not None and max_sequence_tokens < self._max_model_len:
                limit += f" ({_describe_pool(epoch.cache)})"
            return (
                "prompt" if num_prompt_tokens >= max_sequence_tokens else "sampling.max_tokens",
                f"the prompt has {num_prompt_tokens} tokens and max_tokens is {request.max_tokens}: together "
                f"{num_tokens}, {limit}; shorten the prompt or lower max_tokens",
            )
        width = request.beam.beam_width if request.beam else 1
        max_width = epoch.slots.num_slots if epoch else self._max_num_seqs
        if width > max_width:
            return (
                "sampling.beam_width",
                f"beam_width is {width}, but this server runs at most {max_width} sequences at a time; lower it",
            )
        cache = epoch.cache if epoch else None
        num_blocks = cache.num_most_blocks(request) if cache else 0
        if cache is None or num_blocks <= cache.pool.num_blocks:
            return "", ""
        what = "beam_width" if request.beam else "n"
        return (
            f"sampling.{what}",
            f"with {what} {request.num_rows} the request may need {num_blocks} blocks of "
            f"{cache.block_size} tokens, the worker has {cache.pool.num_blocks}; lower {what} or max_tokens",
        )


def _describe_pool(cache: CacheManager) -> str:
    """Say how many blocks there are, and how many a window needs where it does not fit into them."""
    text = f"the worker has {cache.pool.num_blocks} blocks of {cache.block_size} tokens"
    if not cache.window or cache.num_chunk_blocks(1) <= cache.pool.num_blocks:
        return text
    return f"{text}, the window of {cache.window} tokens needs {cache.num_chunk_blocks(1)}"
