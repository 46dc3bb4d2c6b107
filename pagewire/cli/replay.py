"""`pagewire replay`: replays a recording without a worker and verifies that every plan is the same."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.options import Parser
from scheduler_service.core.request import TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.recording import (
    CutShortError,
    Event,
    RecordingError,
    RecordingReader,
    encode,
    failure,
    outcome,
)

SUCCESS, DIFFERENT, UNREADABLE = 0, 1, 2


def main(arguments: Sequence[str]) -> int:
    """Run the command `pagewire replay`, which replays a recording of the scheduler. Return the exit code: 0 if every
    plan equals the recorded plan, 1 if a plan differs or the recording is cut short, and 2 if the recording cannot be
    read."""
    parser = Parser(
        prog="pagewire replay",
        description="Run a scheduler's recording (--record FILE) again without a worker, and check that all plans are "
        "the same.",
    )
    parser.add_argument("file", metavar="FILE", help="the file that --record wrote")
    parser.add_argument("--plans", action="store_true", help="print every plan, as one JSON object per line")
    parsed = parser.parse_args(arguments)
    try:
        with Path(parsed.file).open(encoding="ascii", errors="replace", newline="\n") as file:
            return _replay(RecordingReader(file), prints_plans=parsed.plans)
    except OSError as error:
        reason = f"cannot read {parsed.file}: {error.strerror}"
    except (RecordingError, ValueError) as error:
        reason = f"{parsed.file}: {error}"
    print(f"pagewire: error: {reason}", file=sys.stderr)
    return UNREADABLE


@dataclass(slots=True)
class _Progress:
    num_events: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    started_at: float = 0.0

    def count(self, event: Event, value: Any) -> None:
        self.num_events = event.number
        if event.name == "schedule" and value is not None:
            self.num_steps += 1
        if isinstance(value, TokenOutputs):
            self.num_tokens += len(value.token_ids) + sum(len(found.token_ids) for found in value.hypotheses)

    def __str__(self) -> str:
        seconds = time.monotonic() - self.started_at
        return f"{self.num_events} events, {self.num_steps} steps, {self.num_tokens} tokens in {seconds:.2f} s"


def _replay(reader: RecordingReader, *, prints_plans: bool) -> int:
    scheduler, progress = Scheduler(reader.options), _Progress(started_at=time.monotonic())
    try:
        for event in reader.events():
            value, told = _perform(scheduler, event)
            if prints_plans and isinstance(told, list) and event.name == "schedule":
                print(encode(told[1]))
            if encode(told) != encode(event.outcome):
                print(f"event {event.number} ({event.name} at {event.now:.6f} s) differs")
                print(f"expected: {encode(event.outcome)}")
                print(f"actual:   {encode(told)}")
                if isinstance(value, TokenOutputs):
                    print(f"that is:  {encode(value)}")
                print(f"replayed before it without a difference: {progress}")
                return DIFFERENT
            progress.count(event, value)
    except CutShortError as error:
        print(f"{error}; {error.number - 1} events were replayed without a difference")
        return DIFFERENT
    print(f"replayed without a difference: {progress}")
    return SUCCESS


def _perform(scheduler: Scheduler, event: Event) -> tuple[Any, Any]:
    """Apply a recorded event to the scheduler: call the scheduler's method that the event names, with the recorded
    arguments.

    Return a pair: the result of the method, and the same result in the encoding of recordings. If the method raises an
    exception, the pair is None and the encoded exception.
    """
    try:
        value = getattr(scheduler, event.name)(*event.arguments, event.now)
    except Exception as error:  # compared with the recorded exception
        return None, failure(error)
    scheduler.take_kv_events()  # a replay has no subscriber
    return value, outcome(value)
