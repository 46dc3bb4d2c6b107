"""The availability of a server: whether it accepts requests, and how long a sequence may be.

The availability changes when a worker joins or leaves, and when the server shuts down. If the worker is lost, requests
wait for a worker for a limited time. After the grace period, requests that another server could run just as well fail:
they have no output and are not detached. After the timeout, all requests fail. If the first worker is still starting at
the timeout and has made progress, the timeout begins again: the worker may have to compile its kernels.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pagewire.common.wire.messages import WorkerCapacity, WorkerStarting
from scheduler_service.core.request import OutputMode
from scheduler_service.serving.clock import Clock

logger = logging.getLogger(__name__)

# After this many consecutive epochs without a token, the worker is not merely restarting: the server stops serving.
_MAX_FRUITLESS_EPOCHS = 10


class DescribedWorker(Protocol):
    """The properties of a worker that clients see. A scheduler has the worker's own `WorkerCapacity`, and a front end
    has a message from its scheduler."""

    @property
    def block_size(self) -> int:
        """The number of tokens in one block of the KV cache."""

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend (kernels) that the worker uses."""

    @property
    def dtype(self) -> str:
        """The data type of the weights and of the KV cache."""

    @property
    def weight_format(self) -> str:
        """The format in which the worker stores the weights."""


class Availability(Protocol):
    """The interface that reports whether an engine accepts requests, and how long a sequence may be. It has two
    implementations, one for a scheduler and one for a front end."""

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set whenever the availability changes. Only one task may wait for this event; that task
        clears the event."""

    @property
    def is_serving(self) -> bool:
        """Whether clients should send requests to this server. Health checks return this value."""

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
        """Return the reason why requests with this output mode are refused now, or an empty string if they are
        accepted."""

    @property
    def missing_reason(self) -> str:
        """The reason why no worker is connected, if it is known. It is part of messages to clients."""

    @property
    def capacity(self) -> DescribedWorker | None:
        """The properties of the connected worker, or of the last worker if it was lost. None before the first worker
        has connected."""

    @property
    def max_sequence_tokens(self) -> int:
        """The maximum number of tokens of one sequence, prompt and output together."""

    async def wait_for_first_worker(self, output_mode: OutputMode) -> None:
        """Wait until the first worker has connected, so that the maximum length of a sequence is known. Also return if
        requests with this output mode are refused."""


class WorkerAvailability:
    """A record of whether a scheduler accepts requests. This depends mainly on the worker: if it is missing for too
    long, requests are refused. All methods must be called on the event loop's thread.

    The step loop reports when a worker connects or is lost. The link to the worker reports why no worker is connected.
    """

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
        """Create the record for a scheduler to which no worker is connected yet. If the worker is missing for
        `worker_timeout` seconds, all requests fail. After `worker_grace` seconds, requests already fail if they have no
        output and are not detached; the default is `worker_timeout`. `on_timed_out` and `on_grace_ended` are called to
        end these requests, with the reason as their argument. `max_sequence_tokens` is the maximum length of a sequence
        until the first worker connects."""
        self._clock = clock
        self._worker_timeout = worker_timeout
        self._worker_grace = worker_timeout if worker_grace is None else worker_grace
        self._on_grace_ended = on_grace_ended
        self._on_timed_out = on_timed_out
        self._cancel_timers: list[Callable[[], None]] = []  # empty while a worker is connected
        self._grace_has_ended = self._has_timed_out = False
        self._missing: dict[int | None, str | WorkerStarting] = {}  # by rank, why it is not connected
        self._progress: set[tuple[int | None, WorkerStarting]] = set()  # that extended the timeout
        self._is_draining = False
        self._num_fruitless_epochs = 0
        self._next_change = asyncio.Event()  # replaced at every change
        self.changed = asyncio.Event()  # for one follower, which clears it
        self.capacity: WorkerCapacity | None = None  # of the connected worker, or of the last one
        self.max_sequence_tokens = max_sequence_tokens
        self.num_epochs = 0
        self.num_worker_losses = 0

    # Questions

    def refusal(self, output_mode: OutputMode = OutputMode.STREAMED) -> str:
        """Return the reason why requests with this output mode are refused now, or an empty string if they are
        accepted. After the loss of the worker, detached requests are accepted until the timeout, and other requests
        until the end of the grace period."""
        if self._is_draining:
            return "the server is shutting down; send the request to another one"
        if self._has_timed_out:
            return f"no worker has been connected for {self._worker_timeout:g} s; try again later"
        if self._grace_has_ended and output_mode is not OutputMode.DETACHED:
            return f"no worker has been connected for {self._worker_grace:g} s; send the request to another server"
        return ""

    @property
    def missing_reason(self) -> str:
        """The reason why no worker is connected, if it is known. If the worker has several ranks, the text contains the
        reason for each rank."""
        return "; ".join(
            str(why) if rank is None else f"rank {rank}: {why}"
            for rank, why in sorted(self._missing.items(), key=lambda each: each[0] or 0)
        )

    @property
    def is_serving(self) -> bool:
        """Whether clients should send requests to this server. The value remains true for a while after a worker is
        lost, since the worker may return."""
        return self.capacity is not None and self._num_fruitless_epochs < _MAX_FRUITLESS_EPOCHS and not self.refusal()

    async def wait_for_first_worker(self, output_mode: OutputMode = OutputMode.STREAMED) -> None:
        """Wait until the first worker has connected, so that the maximum length of a sequence is known. Also return if
        requests with this output mode are refused."""
        while self.capacity is None and not self.refusal(output_mode):
            await self._next_change.wait()

    # Events

    def worker_joined(self, capacity: WorkerCapacity, max_sequence_tokens: int) -> None:
        """Record that a worker has connected. A sequence may have up to `max_sequence_tokens` tokens with this
        worker."""
        self.stop_timers()
        self.num_epochs += 1
        self._grace_has_ended = self._has_timed_out = False
        self.capacity, self.max_sequence_tokens = capacity, max_sequence_tokens
        self._missing.clear()
        self._tell()

    def worker_missing(self, reason: str | WorkerStarting, rank: int | None) -> None:
        """Record the reason why the worker is not ready. `rank` is the rank that is not ready, or None if the worker
        has only one rank."""
        self._missing[rank] = reason

    def worker_lost(self, reason: str, *, has_no_token: bool) -> None:
        """Record that the connected worker was lost. `has_no_token` is true if this worker received a plan but computed
        no token. The caller must call `worker_left` next."""
        self.num_worker_losses += 1
        if has_no_token:
            self._num_fruitless_epochs += 1
            if self._num_fruitless_epochs == _MAX_FRUITLESS_EPOCHS:
                logger.error("not serving: %d consecutive epochs without a token; %s", _MAX_FRUITLESS_EPOCHS, reason)

    def worker_left(self) -> None:
        """Record that no worker is connected now, and start the timers that end waiting requests."""
        self.start_timers()
        self._tell()

    def has_computed_token(self) -> None:
        """Record that the worker has computed its first token since it connected. Reset the count of consecutive
        connections that ended without a token."""
        if self._num_fruitless_epochs:
            self._num_fruitless_epochs = 0
            self._tell()

    def drain(self) -> None:
        """Refuse all requests from now on, because the server shuts down."""
        self._is_draining = True
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self._next_change.set()
        self._next_change = asyncio.Event()

    # Timers

    def start_timers(self) -> None:
        """Start the timers that end waiting requests if no worker connects in time."""
        self.stop_timers()
        self._cancel_timers.append(self._clock.later(self._worker_timeout, self._worker_timed_out))
        if self._worker_grace < self._worker_timeout:
            self._cancel_timers.append(self._clock.later(self._worker_grace, self._worker_grace_ended))

    def stop_timers(self) -> None:
        """Stop the timers that end waiting requests, because a worker has connected or the server ends."""
        for cancel in self._cancel_timers:
            cancel()
        self._cancel_timers.clear()

    def _worker_grace_ended(self) -> None:
        logger.log(
            self._level_of_absence(logging.WARNING),
            "no worker for %g s: requests without output fail until a worker joins, streams and detached requests wait",
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
            "no worker for %g s: requests fail until a worker joins",
            self._worker_timeout,
        )
        self._has_timed_out = True
        self._on_timed_out(self.refusal())
        self._tell()

    def _level_of_absence(self, level: int) -> int:
        """Return the log level for a message about a missing worker: INFO if no worker has ever connected, because the
        first one may still be loading its model, otherwise `level`."""
        return logging.INFO if self.capacity is None else level
