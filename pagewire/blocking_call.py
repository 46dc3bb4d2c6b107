"""Reads the responses of a blocking call in a way that Ctrl-C cannot harm."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

Response = TypeVar("Response")

# Read before they are asked for; gRPC's flow control holds back what comes beyond.
_MAX_READ_AHEAD = 16


@dataclass(frozen=True, slots=True)
class _End:
    """The mark behind the last response. It holds the exception that ended the responses, if one did."""

    failure: Exception | None


def responses(call: Iterator[Response]) -> Iterator[Response]:
    """Yields the responses of a blocking call. Whoever leaves early cancels the call.

    Ctrl-C raises its exception in the main thread wherever that is. Where gRPC takes a lock just then, nobody ever
    frees it, and the channel stands still. So what the main thread reads is read by another thread, and waited for in a
    queue, which no exception harms. Other threads read for themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield from call
        return
    inbox: queue.SimpleQueue[Response | _End] = queue.SimpleQueue()
    demand: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for _ in range(_MAX_READ_AHEAD):
        demand.put(True)
    threading.Thread(target=_read, args=(call, demand, inbox), name="pagewire-reader", daemon=True).start()
    try:
        while not isinstance(response := inbox.get(), _End):
            yield response
            demand.put(True)
        if response.failure is not None:
            raise response.failure
    finally:
        demand.put(False)


def _read(
    call: Iterator[Response], demand: "queue.SimpleQueue[bool]", inbox: "queue.SimpleQueue[Response | _End]"
) -> None:
    """Reads one response for each True of `demand`, until there is a False."""
    failure = None
    try:
        while demand.get():
            inbox.put(next(call))
    except StopIteration:
        pass
    except Exception as error:
        failure = error
    inbox.put(_End(failure))
