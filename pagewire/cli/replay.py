"""`pagewire replay`: replays a recording without a worker and verifies that every plan is the same."""

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewire.cli.figures import duration, rounded
from pagewire.options import Parser
from scheduler_service.core import explain
from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.request import TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.activity import share
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
        description="Run a scheduler's recording (`pagewire serve MODEL --record FILE`) again, without a worker or "
        "model. Print a summary: the load, the use of the KV cache, and why requests waited. Check that all plans are "
        "the same as in the recording; a difference means another version of Pagewire or a bug.",
    )
    parser.add_argument("file", metavar="FILE", help="the file that --record wrote")
    parser.add_argument(
        "--plans", action="store_true", help="print every plan, as one JSON object per line, instead of the summary"
    )
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


class _Summary:
    """The content of a recording up to an event: counts, the load, and the reasons why requests waited."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()  # sequences, by reason
        self._peaks: Counter[str] = Counter()
        self._now = 0.0  # in the time of the recording
        self._reason, self._used = "", 0.0  # why the first request in the queue waits; the share of the device blocks
        self._seconds: dict[str, float] = defaultdict(float)  # by this reason
        self._used_seconds = 0.0  # the integral of the share over time

    def count(self, event: Event, value: Any, state: Lifecycle) -> None:
        """Count an event, its result, and the state of the scheduler after the event."""
        elapsed = event.now - self._now if self._counts else 0.0
        self._now = event.now
        self._used_seconds += elapsed * self._used
        self._seconds[self._reason] += elapsed
        self._counts.update({"events": 1, event.name: value is not None})
        if isinstance(value, TokenOutputs):
            tokens = [value.token_ids, *(found.token_ids for found in value.hypotheses)]
            self._counts["tokens"] += sum(map(len, tokens))
            self._ended.update(end.reason.value for end in value.ended)
        if event.name in ("schedule", "worker_lost"):
            stats = explain.stats(state)
            self._reason = re.sub(r"[,;].*|\d+ (of \d+ )?", "", explain.queue_reason(state))
            self._used = share(stats.num_held_blocks, stats.num_device_blocks)
            self._peaks |= Counter(running=stats.num_running, waiting=stats.num_waiting, used=round(100 * self._used))

    def table(self, state: Lifecycle) -> str:
        """Return the summary as lines of names and values. `state` is the state of the scheduler after all events."""
        stats, counts, peaks, seconds = explain.stats(state), self._counts, self._peaks, sum(self._seconds.values())
        reasons = sorted(filter(None, self._seconds), key=lambda reason: -self._seconds[reason])
        waits = [f"{share(self._seconds[reason], seconds):.0%} of the time, {reason}" for reason in reasons]
        rows = {
            "recorded": f"{duration(seconds)}, {rounded(share(counts['schedule'], seconds))} steps/s",
            "requests": f"{counts['add']}, at most {peaks['running']} running and {peaks['waiting']} waiting",
            "ended": ", ".join(f"{number} {reason}" for reason, number in self._ended.most_common()) or "none",
            "tokens": f"{stats.num_prompt_tokens} prompt ({stats.num_cached_prompt_tokens} cached), "
            f"{counts['tokens']} output, {rounded(share(counts['tokens'], seconds))} output/s",
            "KV cache": f"{share(self._used_seconds, seconds):.0%} held on average, {peaks['used']}% at most",
            "preempted": f"{stats.num_preemptions} times, {stats.num_swap_preemptions} of them by swapping",
            "waiting": f"the first request in the queue: {', '.join(waits) or 'never'}",
        }
        return "\n".join(f"{name:<9}  {value}" for name, value in rows.items())

    def __str__(self) -> str:
        seconds, counts = time.monotonic() - self._started_at, self._counts
        return f"{counts['events']} events, {counts['schedule']} steps, {counts['tokens']} tokens in {seconds:.2f} s"


def _replay(reader: RecordingReader, *, prints_plans: bool) -> int:
    scheduler, summary = Scheduler(reader.options), _Summary()
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
                print(f"replayed before it without a difference: {summary}")
                return DIFFERENT
            summary.count(event, value, scheduler.state)
    except CutShortError as error:
        print(f"{error}; {error.number - 1} events were replayed without a difference")
        return DIFFERENT
    print(f"replayed without a difference: {summary}")
    if not prints_plans:
        print(summary.table(scheduler.state))
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
