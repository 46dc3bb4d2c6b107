"""The contract of whatever carries requests out: the step loop, or a front end's link to its scheduler."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from scheduler_service.core.request import OutputMode, Request
from scheduler_service.serving.clock import Clock
from scheduler_service.serving.token_stream import Receiver


class DescribedWorker(Protocol):
    """The worker that clients are told of: its own description (`WorkerCapacity`), or its scheduler's (a message)."""

    @property
    def block_size(self) -> int:
        """The tokens of one block of its KV cache."""

    @property
    def attention_backend(self) -> str:
        """The name of what computes its attention."""

    @property
    def dtype(self) -> str:
        """The data type of its weights and of its KV cache."""


class Availability(Protocol):
    """Whether requests are taken, and what fits: as the step loop knows it, or as a front end's link has heard."""

    @property
    def changed(self) -> asyncio.Event:
        """For one follower, who clears it."""

    @property
    def is_serving(self) -> bool:
        """Whether requests are worth sending here."""

    @property
    def unavailable_reason(self) -> str:
        """The reason why requests are refused now, or nothing."""

    def refusal(self, output_mode: OutputMode) -> str:
        """Return why requests of this kind are refused now, or nothing."""

    @property
    def missing_reason(self) -> str:
        """The reason why there is no worker, as far as is known."""

    @property
    def capacity(self) -> DescribedWorker | None:
        """The worker that is there or was there last."""

    @property
    def max_sequence_tokens(self) -> int:
        """The tokens of prompt and output that one sequence may have."""

    async def wait_for_first_worker(self, output_mode: OutputMode) -> None:
        """Return when it is known what fits, or when requests of this kind are refused."""


class RequestEngine(Protocol):
    """Whatever carries requests out; those that take calls know nothing else of it."""

    @property
    def clock(self) -> Clock:
        """The clock of which the deadlines of requests are."""

    @property
    def availability(self) -> Availability:
        """Whether requests are taken now, and what fits."""

    def submit(self, request: Request, receiver: Receiver, trace: Mapping[str, str]) -> list[int]:
        """Queue a request that is part of the trace which these headers tell; the ids of its sequences. Raises
        AdmissionError or RefusedError if it is refused at once; a link hears of some refusals later, and tells the
        receiver."""

    def abort(self, tenant: str, request_id: str) -> None:
        """Let a request end with ABORT. Raises KeyError if there is none of that name."""

    def cancel(self, sequence_ids: list[int]) -> None:
        """Let what is left of a request end with ABORT, even if another uses its name by now."""

    def settle(self, sequence_id: int, num_computed: int, num_kept: int) -> None:
        """Take note of how many tokens of a sample its client got, of those that it was given. For samples whose
        receiver does not keep all."""

    def stop(self, sequence_id: int, num_output_tokens: int) -> None:
        """End a sequence after this many tokens, since a stop text was found in them."""
