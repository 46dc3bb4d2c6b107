"""Reconnecting a link: when it tries again, and what it logs until then, calmly where that is how a start looks."""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import grpc.aio

from pagewire.common.process.log_repetition import Repetition
from pagewire.common.process.shutdown import cancel
from pagewire.common.wire.messages import WorkerStarting
from pagewire.common.wire.transport.dialling import Dialler
from pagewire.common.wire.transport.wrong_port import RightPort

# Of the channel to the other side.
LINK_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Who was replaced comes back at another address of the same name.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Who is gone without a word takes at most so long to notice; whether a worker lives is judged by heartbeats.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
)
# Seconds between the end of a session and the next attempt, twice as long from one to the next.
_MIN_BACKOFF = 0.1
_MAX_BACKOFF = 1.0
_PATIENCE = 3.0  # seconds without a connection before that is told
_LAST_ERROR = re.compile(r"^.*last error: (?:\w+: )?")


class Outdated(Exception):
    """The channel would go on with files that have been renewed."""


class Ended(NamedTuple):
    """The reason for which there is no session, or no more."""

    reason: str
    was_held: bool = False  # there was one
    is_calm: bool = False  # it passes by itself
    rank: int = 0  # whose session it was, of a worker that has several


class Backoff:
    """The time between the end of a session and the next attempt."""

    def __init__(self) -> None:
        self._seconds = _MIN_BACKOFF

    async def wait(self, ended: Ended) -> None:
        """Wait before the next attempt, twice as long as before the last one unless that was held."""
        if ended.was_held:
            self._seconds = _MIN_BACKOFF
        await asyncio.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _MAX_BACKOFF)


class Outage:
    """The time without a session: reports each reason, and logs a new one at once, and one that differs only in its
    numbers or in gRPC's words for the same thing once a minute."""

    def __init__(
        self,
        name: str,
        logger: logging.Logger,
        port: RightPort,
        on_reason: Callable[[str | WorkerStarting], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is what the other side is called, and `port` says where it is. `on_reason` hears every reason, logged
        or not; `clock` is in seconds."""
        self._name = name
        self._logger = logger
        self._port = port
        self._on_reason = on_reason
        self._repetition = Repetition(clock)

    def tell(self, reason: str | WorkerStarting, *, is_calm: bool) -> None:
        """Tell the reason, or what else is at a port of which gRPC says so; `is_calm` says that it passes by itself, as
        when the other side is starting."""
        text = str(reason)
        reading = self._port.reading("its port", text) or self._port.reading(
            "its port", f"there is no session ({text})"
        )
        self._on_reason(reading or reason)
        # A reading is the same whichever of the host's addresses gRPC's words are about.
        if not self._repetition.is_news(reading.partition(" (")[0] if reading else text):
            return
        if is_calm and reading is None:
            self._logger.info("waiting for %s: %s", self._name, text)
        else:
            self._logger.warning("no session with %s: %s", self._name, reading or text)

    def end(self) -> None:
        """Take note that the other side has come. Should it go, everything is new again."""
        self._repetition.forget()

    async def connect(
        self,
        connecting: Coroutine[Any, Any, None],
        dialler: Dialler,
        probe: Callable[[], grpc.aio.Call],
    ) -> None:
        """Return when `connecting` is done, which waits for a connection without a word, and tell why there is none.

        `probe` makes a call that fails where there is no connection, instead of waiting for one. Raises what
        `connecting` does, and Outdated once `dialler` would give another channel.
        """
        task = asyncio.create_task(connecting)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_PATIENCE)
                if done:
                    return task.result()
                if dialler.is_outdated:
                    raise Outdated("there are renewed files to connect with")
                await self._explain(probe())
        finally:
            await cancel([task])

    async def _explain(self, call: grpc.aio.Call) -> None:
        try:
            await call.wait_for_connection()
        except grpc.aio.AioRpcError as error:
            self.tell(
                f"there is no connection ({_LAST_ERROR.sub('', error.details() or error.code().name)})", is_calm=True
            )
        finally:
            call.cancel()
