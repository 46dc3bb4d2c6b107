"""The contract of whatever carries requests out: the step loop, or a front end's link to its scheduler."""

from typing import Protocol

from scheduler_service.core.request import OutputMode, Request
from scheduler_service.serving.token_stream import Receiver


class DescribedWorker(Protocol):
    """The worker that clients are told of: its own description (`WorkerCapacity`), or its scheduler's (a message)."""

    @property
    def block_size(self) -> int: ...

    @property
    def attention_backend(self) -> str: ...

    @property
    def dtype(self) -> str: ...


class RequestEngine(Protocol):
    """Carries requests out, of which those that take calls know nothing but this."""

    # Whether it serves, and what fits

    @property
    def is_serving(self) -> bool: ...

    @property
    def unavailable_reason(self) -> str:
        """Why requests are refused now, or nothing."""

    def refusal(self, output_mode: OutputMode) -> str:
        """Why requests of this kind are refused now, or nothing."""

    @property
    def missing_reason(self) -> str:
        """Why there is no worker, as far as is known."""

    @property
    def capacity(self) -> DescribedWorker | None:
        """The worker that is there or was there last."""

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output that one sequence may have."""

    async def wait_for_first_worker(self, output_mode: OutputMode) -> None:
        """Before it, nobody knows what fits. Returns too when requests of this kind are refused meanwhile."""

    def now(self) -> float:
        """The clock of `Request.deadline`."""

    # Requests

    def submit(self, request: Request, receiver: Receiver) -> list[int]:
        """Queue a request; the ids of its sequences. Raises AdmissionError or another error if it is refused at once; a
        link hears of some refusals later, and tells the receiver."""

    def abort(self, tenant: str, request_id: str) -> None:
        """Raises KeyError if there is no such request."""

    def cancel(self, sequence_ids: list[int]) -> None:
        """Nobody wants what is left of a request any more."""

    def stop(self, sequence_id: int, num_output_tokens: int) -> None:
        """A stop text ended a sequence after this many tokens."""
