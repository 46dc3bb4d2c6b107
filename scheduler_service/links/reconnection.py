"""Reconnection of a link: the delay before each attempt, and the log lines of an outage."""

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

# gRPC channel options of every link.
LINK_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A replaced process may return under the same host name at another address.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Keepalive detects within 15 s that the other machine has vanished. A worker's liveness is judged by heartbeats.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
)
# Seconds between the end of a session and the next attempt; doubled after each failed attempt.
_MIN_BACKOFF = 0.1
_MAX_BACKOFF = 1.0
_EXPLAIN_INTERVAL = 3.0  # seconds without a connection before the reason is reported
_LAST_ERROR = re.compile(r"^.*last error: (?:\w+: )?")


class Outdated(Exception):
    """Raised if the TLS files have been renewed since a gRPC channel was opened. The link must then reconnect to use
    the new files."""


class Ended(NamedTuple):
    """The reason why a link's session with another process ended, or why no session could be established."""

    reason: str
    was_held: bool = False  # the session had been established
    is_calm: bool = False  # the reason is expected to disappear without intervention
    rank: int = 0  # the rank whose stream ended, of a worker with several ranks


class Backoff:
    """The exponential backoff of a link: the growing delay before each attempt to reconnect."""

    def __init__(self) -> None:
        self._seconds = _MIN_BACKOFF

    async def wait(self, ended: Ended) -> None:
        """Sleep before the next attempt to connect. The delay doubles after each failed attempt. If the last attempt
        established a session, the delay is the minimum again."""
        if ended.was_held:
            self._seconds = _MIN_BACKOFF
        await asyncio.sleep(self._seconds)
        self._seconds = min(2 * self._seconds, _MAX_BACKOFF)


class Outage:
    """A reporter of the reasons why a link has no connection to another process. It passes every reason to a callback,
    and logs the reasons without repetition.

    A new reason is logged at once. If a reason differs from a logged one only in its numbers, or in gRPC's wording of
    the same diagnosis, it is logged again only after a minute.
    """

    def __init__(
        self,
        name: str,
        logger: logging.Logger,
        port: RightPort,
        on_reason: Callable[[str | WorkerStarting], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the reporter for one connection. `name` is the name of the other process in log lines. `port`
        recognizes from an error that the address is the port of another service. `on_reason` is called with every
        reason, logged or not. `clock` returns the time in seconds."""
        self._name = name
        self._logger = logger
        self._port = port
        self._on_reason = on_reason
        self._repetition = Repetition(clock)

    def tell(self, reason: str | WorkerStarting, *, is_calm: bool) -> None:
        """Report the reason why there is no connection, and log it if it is not a repetition. If the error shows that
        the address is the port of another service, report this diagnosis instead.

        `is_calm` means that the reason disappears without intervention, for example because the other process is
        starting. Such reasons are logged at level INFO, all others at level WARNING.
        """
        text = str(reason)
        reading = self._port.reading("its port", text) or self._port.reading(
            "its port", f"there is no session ({text})"
        )
        self._on_reason(reading or reason)
        # gRPC's text may name any of the host's addresses, so only the diagnosis is compared.
        if not self._repetition.should_log(reading.partition(" (")[0] if reading else text):
            return
        if is_calm and reading is None:
            self._logger.info("waiting for %s: %s", self._name, text)
        else:
            self._logger.warning("no session with %s: %s", self._name, reading or text)

    def end(self) -> None:
        """Record that a connection has been established. If it is lost, all reasons are logged again."""
        self._repetition.forget()

    async def connect(
        self,
        connecting: Coroutine[Any, Any, None],
        dialler: Dialler,
        probe: Callable[[], grpc.aio.Call],
    ) -> None:
        """Wait until a link is connected, and report every few seconds why it is not connected yet. `connecting` is a
        coroutine that waits for the gRPC connection.

        `probe` starts an RPC that fails immediately if there is no connection; its error contains the reason.
        Exceptions of `connecting` are raised again. Raise Outdated if the TLS files of `dialler` are renewed during the
        wait.
        """
        task = asyncio.create_task(connecting)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_EXPLAIN_INTERVAL)
                if done:
                    return task.result()
                if dialler.is_outdated:
                    raise Outdated("the TLS files were renewed; reconnecting with them")
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
