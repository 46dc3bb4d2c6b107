"""Whether requests are taken, and what fits: what follows from a worker's coming and going, and from shutting down.

Requests wait for a worker that is lost, but not for ever: after the grace period those end that could as well begin
elsewhere, after the timeout all of them. The first worker is given the timeout anew if it is starting then and has come
further: it may have to compile its kernels.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pagewire.common.wire.messages import WorkerCapacity, WorkerStarting
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.clock import Clock

logger = logging.getLogger(__name__)

# A worker that is lost this often before a token comes back is not merely being restarted.
_MAX_FRUITLESS_EPOCHS = 10


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

    @property
    def weight_format(self) -> str:
        """The format in which it holds the weights."""


class Availability(Protocol):
    """Whether requests are taken, and what fits: as the step loop knows it, or as a front end's link has heard."""

    @property
    def changed(self) -> asyncio.Event:
        """For one follower, who clears it."""

    @property
    def is_serving(self) -> bool:
        """Whether requests are worth sending here."""

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
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


class WorkerAvailability:
    """Belongs to the event loop's thread, and is told of every change by the step loop, and by the link of why there is
    no worker."""

    def __init__(
        self,
        max_sequence_tokens: int,
        clock: Clock,
        *,
        worker_timeout: float,
        worker_grace: float | None,
        on_grace_ended: Callable[[str], None],
        on_timed_out: Callable[[str], None],
    ) -> None:
        """`worker_timeout` is how many seconds any request waits for a worker, `worker_grace` how many those wait that
        could as well begin elsewhere, by default as many. The callbacks end these requests, with the reason that they
        are given. `max_sequence_tokens` is the limit before the first worker."""
        self._clock = clock
        self._worker_timeout = worker_timeout
        self._worker_grace = worker_timeout if worker_grace is None else worker_grace
        self._on_grace_ended = on_grace_ended
        self._on_timed_out = on_timed_out
        self._cancel_timers: list[Callable[[], None]] = []  # while no worker is there
        self._grace_has_ended = self._has_timed_out = False
        self._missing: dict[int | None, str | WorkerStarting] = {}  # by rank, why it is not there
        self._progress: set[tuple[int | None, WorkerStarting]] = set()  # for which the first worker got more time
        self._is_draining = False
        self._num_fruitless_epochs = 0
        self._next_change = asyncio.Event()  # a new one for each change
        self.changed = asyncio.Event()  # for one follower, who clears it
        self.capacity: WorkerCapacity | None = None  # of the worker that is there or was there last
        self.max_sequence_tokens = max_sequence_tokens
        self.num_epochs = 0
        self.num_worker_losses = 0

    # Questions

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
        """Return why requests of this kind are refused now, or nothing. Detached ones are accepted for longer."""
        if self._is_draining:
            return "the server is shutting down; send the request to another one"
        if self._has_timed_out:
            return f"no worker has been connected for {self._worker_timeout:g} s; try again later"
        if self._grace_has_ended and output_mode is not OutputMode.DETACHED:
            return f"no worker has been connected for {self._worker_grace:g} s; send the request to another server"
        return ""

    @property
    def missing_reason(self) -> str:
        """Why there is no worker, as far as is known, in the words of each rank."""
        return "; ".join(
            str(why) if rank is None else f"rank {rank}: {why}"
            for rank, why in sorted(self._missing.items(), key=lambda each: each[0] or 0)
        )

    @property
    def is_serving(self) -> bool:
        """Whether requests are worth sending here: a lost worker may still be awaited."""
        return self.capacity is not None and self._num_fruitless_epochs < _MAX_FRUITLESS_EPOCHS and not self.refusal()

    async def wait_for_first_worker(self, output_mode: OutputMode = OutputMode.STREAMED) -> None:
        """Return when it is known what fits, or when requests of this kind are refused."""
        while self.capacity is None and not self.refusal(output_mode):
            await self._next_change.wait()

    # Events

    def worker_joined(self, capacity: WorkerCapacity, max_sequence_tokens: int) -> None:
        """A worker is there, with which a sequence may have so many tokens."""
        self.stop_timers()
        self.num_epochs += 1
        self._grace_has_ended = self._has_timed_out = False
        self.capacity, self.max_sequence_tokens = capacity, max_sequence_tokens
        self._missing.clear()
        self._tell()

    def worker_missing(self, reason: str | WorkerStarting, rank: int | None) -> None:
        """The worker does not begin an epoch: why, and which rank says so of a worker that has several."""
        self._missing[rank] = reason

    def worker_lost(self, reason: str, *, is_fruitless: bool) -> None:
        """The worker has failed, before the first token of an epoch that computes if that `is_fruitless`. `worker_left`
        follows."""
        self.num_worker_losses += 1
        if is_fruitless:
            self._num_fruitless_epochs += 1
            if self._num_fruitless_epochs == _MAX_FRUITLESS_EPOCHS:
                logger.error("not serving: %d epochs without one token; %s", _MAX_FRUITLESS_EPOCHS, reason)

    def worker_left(self) -> None:
        """No worker is there any more."""
        self.start_timers()
        self._tell()

    def epoch_bore_fruit(self) -> None:
        """The worker has computed the first token of its epoch."""
        if self._num_fruitless_epochs:
            self._num_fruitless_epochs = 0
            self._tell()

    def drain(self) -> None:
        """From now on requests are refused."""
        self._is_draining = True
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self._next_change.set()
        self._next_change = asyncio.Event()

    # Timers

    def start_timers(self) -> None:
        """Count the time without a worker from now on."""
        self.stop_timers()
        self._cancel_timers.append(self._clock.later(self._worker_timeout, self._worker_timed_out))
        if self._worker_grace < self._worker_timeout:
            self._cancel_timers.append(self._clock.later(self._worker_grace, self._worker_grace_ended))

    def stop_timers(self) -> None:
        """The time without a worker does not count any more."""
        for cancel in self._cancel_timers:
            cancel()
        self._cancel_timers.clear()

    def _worker_grace_ended(self) -> None:
        logger.log(
            self._level_of_absence(logging.WARNING),
            "no worker for %g s: requests without a token fail until one joins, streams and detached ones wait",
            self._worker_grace,
        )
        self._grace_has_ended = True
        self._on_grace_ended(self.refusal())
        self._tell()

    def _worker_timed_out(self) -> None:
        starting = {(rank, why) for rank, why in self._missing.items() if isinstance(why, WorkerStarting)}
        if self.capacity is None and not starting <= self._progress:
            self._progress |= starting
            self._cancel_timers.append(self._clock.later(self._worker_timeout, self._worker_timed_out))
            return
        logger.log(
            self._level_of_absence(logging.ERROR),
            "no worker for %g s: requests fail until one joins",
            self._worker_timeout,
        )
        self._has_timed_out = True
        self._on_timed_out(self.refusal())
        self._tell()

    def _level_of_absence(self, level: int) -> int:
        """A worker that is still loading its first model is no accident."""
        return logging.INFO if self.capacity is None else level
