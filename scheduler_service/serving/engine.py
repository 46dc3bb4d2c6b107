"""What those that take calls know of what carries requests out."""

import asyncio
from typing import Protocol

from scheduler_service.core.request import OutputMode


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
