"""A recording of every event that enters the core, with its outcome. `pagewire replay` repeats the events without a
worker.

The core does no I/O and reads no clock. So every plan is determined by the core's options and by the order of the
events, with their arguments, times, rates and seeds. A recording is a text file of JSON lines: a header with the
version and the scheduler's options, followed by [event, time, arguments, outcome] for each event. Fields of dataclasses
that have their default value are omitted. Outcomes:

- a plan: the xxh3_64 of the complete plan, and the plan, in which numbers of tokens replace the tokens of row openings;
- outputs for clients: their xxh3_64;
- ids of new sequences, or null;
- {"error": ...}: an exception.

If the file could not be written in time, events are missing, and {"missing_events": their number} is in their place.

The file contains every prompt, so it is created readable by its owner only.
"""

import json
import logging
import os
import struct
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64_hexdigest

from pagewire.common.process.queued_writer import QueuedWriter, descriptor_writer
from pagewire.common.strict_json import StrictEncoder
from pagewire.common.wire.messages import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.request import Request, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions

logger = logging.getLogger(__name__)

VERSION = 8
# The events and the types of their arguments. The time is an additional last argument of each event.
EVENTS: dict[str, tuple[type, ...]] = {
    "add": (Request,),
    "abort": (str, str),
    "stop": (int, int),
    "schedule": (),
    "complete": (StepResult,),
    "moved": (int,),
    "grammar_ready": (int, str),
    "worker_joined": (WorkerCapacity, int),
    "worker_lost": (),
    "worker_grace_ended": (),
    "worker_timed_out": (),
    "flush_cache": (),
}
_MISSING = "missing_events"
_FLUSH_INTERVAL = 1.0  # seconds
_MAX_PENDING_CHARS = 262_144
_MAX_HEADER_CHARS = 65_536
MAX_WAITING_BYTES = 64 << 20  # limit on bytes that wait to be written
_CLOSE_TIMEOUT = 2.0  # seconds


class Recorder:
    """A writer of a recording file, which contains every event that enters the scheduler core. A separate thread writes
    to the file, so that recording never delays requests.

    If writing fails, or if too many bytes wait to be written, the recording ends early. Its last line says so, if the
    line can still be written.
    """

    def __init__(self, path: str, options: SchedulerOptions) -> None:
        self._path = path
        self._descriptor = -1
        self._writer: QueuedWriter | None = None
        self._pending = [encode({"pagewire_recording": VERSION, "scheduler": asdict(options)})]
        self._num_pending_chars = 0
        self._flushed_at = 0.0

    def open(self) -> None:
        """Create the recording file. An existing file of this name is renamed to PATH.old. Raise OSError if the file
        cannot be written."""
        path = Path(self._path)
        # A FIFO may have no reader yet. Opening it for reading and writing succeeds nevertheless.
        mode = os.O_RDWR if path.is_fifo() else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            if path.is_file():
                path.replace(f"{self._path}.old")
            self._descriptor = os.open(path, mode | os.O_NONBLOCK, 0o600)
        except OSError as error:
            raise OSError(f"--record {self._path} cannot be written: {error.strerror}; name another file") from error
        self._writer = QueuedWriter(
            descriptor_writer(self._descriptor),
            _missing_events_line,
            max_waiting_bytes=MAX_WAITING_BYTES,
            ends_at_loss=True,
        )
        self.flush()

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def write(self, name: str, now: float, arguments: Sequence[Any], outcome: Any) -> None:
        line = encode((name, now, arguments, outcome))
        self._pending.append(line)
        self._num_pending_chars += len(line)
        if self._num_pending_chars >= _MAX_PENDING_CHARS or now - self._flushed_at >= _FLUSH_INTERVAL:
            self._flushed_at = now
            self.flush()

    def flush(self) -> None:
        """Give the pending lines of the recording to the writer thread. If the thread had to drop bytes, end the
        recording."""
        if self._writer is not None and self._pending:
            self._writer.put("\n".join([*self._pending, ""]).encode("ascii"))
            if self._writer.num_dropped:
                reason = (
                    self._writer.failure or f"its file accepted no bytes while {MAX_WAITING_BYTES >> 20} MiB arrived"
                )
                logger.error("the recording %s ends here, serving goes on: %s", self._path, reason)
                self._end()
        self._pending.clear()
        self._num_pending_chars = 0

    def close(self) -> None:
        """End the recording. Wait until all lines are written to the file, but at most `_CLOSE_TIMEOUT` seconds."""
        self.flush()
        if self._writer is None:
            return
        if self.is_written_within(_CLOSE_TIMEOUT):
            os.close(self._descriptor)
        else:
            logger.error("the recording %s lacks its last events: its file accepts no bytes", self._path)
        self._end()

    def is_written_within(self, timeout: float) -> bool:
        """Wait until the writer thread has written all bytes of the recording, but at most `timeout` seconds. Return
        whether it has written them."""
        return self._writer is not None and self._writer.flush(timeout)

    def _end(self) -> None:
        """End the recording. The writer thread ends after it has written the remaining bytes. If the file accepts no
        bytes, the file stays open for the thread."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _missing_events_line(num_lines: int) -> bytes:
    """Return the last line of an incomplete recording, as bytes. It contains the number of missing events."""
    return f"{encode({_MISSING: num_lines})}\n".encode()


def record(scheduler: Scheduler, recorder: Recorder) -> Scheduler:
    """Replace the methods of a scheduler with methods that also record each call and its outcome. Return the same
    scheduler.

    Recording takes about 80 us in each step with 256 decoding sequences, measured on one core; the scheduler core
    itself takes 185 us. Most of the time is spent on encoding the result's tokens and on the digest of the outputs.
    """
    for name in EVENTS:
        setattr(scheduler, name, partial(_perform, scheduler, recorder, name, getattr(scheduler, name)))
    return scheduler


def _perform(scheduler: Scheduler, recorder: Recorder, name: str, event: Callable[..., Any], *given: Any) -> Any:
    if not recorder.is_open:
        return event(*given)
    *arguments, now = given
    try:
        value = event(*given)
    except Exception as error:
        recorder.write(name, now, arguments, failure(error))
        recorder.flush()
        raise
    recorder.write(name, now, arguments, outcome(value))
    if not scheduler.has_requests:
        recorder.flush()  # the next event may come much later
    return value


# Outcomes


def outcome(value: StepPlan | TokenOutputs | list[int] | None) -> Any:
    """Return the form in which a recording stores the return value of a scheduler event. For a plan, it is a hash and
    the plan's fields. For outputs for clients, it is a hash. Other values stay the same."""
    if isinstance(value, StepPlan):
        return _plan_outcome(value)
    if isinstance(value, TokenOutputs):
        return _outputs_digest(value)
    return value


def failure(error: Exception) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"}


def _plan_outcome(plan: StepPlan) -> list[Any]:
    columns = _encode(plan)
    tokens = [opening.token_ids for opening in plan.openings]
    if tokens:
        columns["openings"] = [_encode(opening) | {"token_ids": len(opening.token_ids)} for opening in plan.openings]
    return [xxh3_64_hexdigest(encode(columns).encode() + _pack(*tokens)), columns]


def _outputs_digest(outputs: TokenOutputs) -> str:
    data = _pack(outputs.sequence_ids, outputs.token_ids)
    if outputs.ended or outputs.hypotheses or outputs.logprobs or outputs.prompt_logprobs:
        rare = (outputs.hypotheses, outputs.logprobs, outputs.prompt_logprobs, outputs.ended)
        data += encode(rare).encode()
    return xxh3_64_hexdigest(data)


def _pack(*columns: Sequence[int]) -> bytes:
    return b"".join(struct.pack(f"<{len(column) + 1}q", len(column), *column) for column in columns)


# Values as JSON


def _encode(value: Any) -> Any:
    """Convert a value that the JSON encoder does not support to a value that it supports. A dataclass becomes a dict
    that omits fields with their default value. Raise TypeError if the type is not supported."""
    if is_dataclass(value):
        data_type: type = type(value)
        found = ((name, getattr(value, name), default) for name, default in _defaults(data_type))
        return {name: item for name, item, default in found if item != default}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"a recording cannot contain a {type(value).__name__}")


# JSON has no infinity and no NaN, which occur in log-probabilities: they are encoded as "-inf", "inf" and "nan".
encode = StrictEncoder(str, default=_encode, separators=(",", ":"), check_circular=False).encode


@cache
def _defaults(data_type: type) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(data_type)]  # MISSING equals nothing


_hints = cache(typing.get_type_hints)


def _decode(hint: Any, value: Any) -> Any:
    """Convert a JSON value from a recording to the type `hint`. Raise TypeError, ValueError or KeyError if the value
    does not match the type."""
    if isinstance(hint, types.UnionType):
        (known,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
        return None if value is None else _decode(known, value)
    if typing.get_origin(hint) is tuple:
        options = typing.get_args(hint)
        if options[-1] is not Ellipsis:
            return tuple(_decode(option, item) for option, item in zip(options, value, strict=True))
        return tuple(value) if options[0] is int else tuple(_decode(options[0], item) for item in value)
    if isinstance(hint, type) and is_dataclass(hint):
        return hint(**{name: _decode(_hints(hint)[name], item) for name, item in value.items()})
    if hint is bytes:
        return bytes.fromhex(value)
    if issubclass(hint, Enum):
        return hint(value)
    if hint is float and value in ("-inf", "inf", "nan"):
        return float(value)
    if not isinstance(value, (int, float) if hint is float else hint):
        raise TypeError(f"{value!r} is not of type {hint.__name__}")
    return value


# Reading


class RecordingError(Exception):
    """Raised if a recording file cannot be replayed. The message is the reason."""


class CutShortError(Exception):
    """Raised if a recording is incomplete, so that only the events before event `number` can be replayed. The message
    is the reason."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a recording: a call of a method of the scheduler core. `number` is its position in the recording,
    which begins at 1. `now` is the time of the call in seconds. `outcome` is the recorded form of the return value or
    exception."""

    number: int
    name: str
    now: float
    arguments: tuple[Any, ...]
    outcome: Any


class RecordingReader:
    """A reader of a recording file. It reads the file once, from the beginning to the end."""

    def __init__(self, file: IO[str]) -> None:
        """Read the header of a recording file. Raise RecordingError if the header is invalid, or if the recording was
        written in another version of the format."""
        try:
            header = json.loads(file.readline(_MAX_HEADER_CHARS))
            version = header["pagewire_recording"]
        except (ValueError, TypeError, KeyError):
            raise RecordingError("this is not a recording of pagewire") from None
        if version != VERSION:
            raise RecordingError(f"the recording has version {version}, but this pagewire replays version {VERSION}")
        try:
            self.options: SchedulerOptions = _decode(SchedulerOptions, header["scheduler"])
        except (ValueError, TypeError, KeyError) as error:
            raise RecordingError(f"the recording's header is damaged: {error}") from None
        self._file = file

    def events(self) -> Iterator[Event]:
        """Yield the events of the recording in order. Raise CutShortError if a line is incomplete or events are
        missing. Raise RecordingError if a line is not an event."""
        for number, line in enumerate(self._file, start=1):
            if not line.endswith("\n"):
                raise CutShortError(number, f"the recording ends in the middle of event {number}")
            try:
                read = json.loads(line)
                if isinstance(read, dict):
                    reason = f"{read[_MISSING]} events or more are missing from event {number} on"
                    raise CutShortError(number, f"{reason}, because they could not be written in time")
                name, now, arguments, told = read
                pairs = zip(EVENTS[name], arguments, strict=True)
                decoded = tuple(_decode(hint, argument) for hint, argument in pairs)
                event = Event(number, name, _decode(float, now), decoded, told)
            except (ValueError, TypeError, KeyError) as error:
                raise RecordingError(f"line {number + 1} of the recording is damaged: {error}") from None
            yield event
