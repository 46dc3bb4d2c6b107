"""Planted bugs of the code that carries outputs, each of which the simulator of outputs must catch.

`python -m tests.sim.outputs.mutants` runs all of them, or those whose names contain a given text.
"""

import sys
from pathlib import Path

from tests.sim.outputs.known_seeds import KNOWN_SEEDS
from tests.sim.planting import Planting, hunt_all, mutant

MUTANTS = (
    # The server's side of GenerateMany
    mutant(
        "an end does not know what went before it in columns",
        "SampleRecord.pop_plain_tokens",
        "self._num_passed = self.num_published",
        "",
    ),
    mutant(
        "streams that find no room in a message are lost",
        "SharedCall._take_tokens",
        "self._ready_list.put_back(outputs[position:])",
        "",
    ),
    mutant(
        "a message takes tokens without end",
        "SharedCall._take_tokens",
        "len(token_ids) >= _MAX_MESSAGE_WEIGHT",
        "False",
    ),
    mutant("a delta weighs nothing", "SharedCall._take_deltas", "room -= _weight(response)", ""),
    mutant(
        "a request that has ended stays in its call", "SharedCall._cancel", "del self._requests[request.stream_id]", ""
    ),
    mutant("failures wait without end for who does not read", "SharedCall._read", "await self._room.wait()", ""),
    mutant("nobody hears of room for more failures", "SharedCall._cancel", "self._room.set()", ""),
    mutant("requests outlive their call", "SharedCall.serve", "self._cancel(request)", ""),
    mutant(
        "a call ends before its last request",
        "SharedCall.serve",
        "self._is_closing and not self._requests",
        "self._is_closing",
    ),
    mutant(
        "a request that is aborted before it is queued goes on",
        "SharedCall._abort",
        'self._fail(request, RefusedError(Reason.CANCELLED, "the request was aborted before it was queued"))',
        "pass",
    ),
    mutant(
        "nobody counts what a client tells that it has kept",
        "SharedCall._stop",
        "self._intake.engine.count_kept_tokens(self._unsettled.pop(stream_id), num_tokens)",
        "self._unsettled.pop(stream_id)",
    ),
    mutant(
        "what waits for a call that is gone is never taken in",
        "ActiveRequest.cancel",
        "ready_list is not None and output.is_queued",
        "False",
    ),
    # Records of output, and their readers
    mutant("what was read of an output is kept", "OutputReader._delta", "output.forget()", "pass"),
    mutant("what is kept is forgotten", "SampleRecord.forget", "self._is_kept", "False"),
    mutant("an end is told twice", "OutputReader._is_due", "not self.has_ended", "True"),
    mutant("text that comes with an end is lost", "SampleRecord._decode", "text + rest", "text"),
    mutant(
        "a reader that begins amid text begins with too little",
        "SampleRecord._chars_before",
        "self._text_ends[position - 1]",
        "self._text_ends[position]",
    ),
    mutant(
        "text behind a stop text is delivered",
        "SampleRecord._decode",
        "if self.stop_text is not None:\n    return num_kept, text",
        "",
    ),
    mutant(
        "who begins late is told of the prompt",
        "OutputReader.__init__",
        "sys.maxsize if first_token else 0",
        "0",
    ),
    # Active requests, and detached ones
    mutant(
        "an active request and its readers refer to each other", "ActiveRequest.cancel", "self.listeners.clear()", ""
    ),
    mutant("readers are not told of a failure", "ActiveRequest.fail", "for tell in self.listeners:\n    tell()", ""),
    mutant("a request ends twice", "ActiveRequest._look_for_end", "not self.has_ended", "True"),
    mutant("what is left of a failed request goes on", "DetachedRequests._end", "active.cancel()", ""),
    mutant("a result that is gone keeps its bytes", "DetachedRequests._forget", "self.num_bytes -= num_bytes", ""),
    mutant(
        "one result too many is kept",
        "DetachedRequests._keep",
        "len(self._ended) > self._max_ended",
        "len(self._ended) > self._max_ended + 1",
    ),
    mutant(
        "a tenant pushes out what others keep",
        "DetachedRequests._next_to_drop",
        "amounts[key[0]] == most",
        "True",
    ),
    mutant(
        "the newest result is pushed out",
        "DetachedRequests._next_to_drop",
        "self._ended",
        "reversed(self._ended)",
    ),
    mutant(
        "a result outlives its time",
        "DetachedRequests._keep",
        "asyncio.get_running_loop().call_later(self._retention, self._forget, key)",
        "asyncio.get_running_loop().call_later(2 * self._retention, self._forget, key)",
    ),
    # Quotas
    mutant("a claim outlives a refused request", "Intake._submit", "claim.release()", "pass"),
    mutant("a claim ends with the first sample", "Claim.record_output", "not self.num_open", "True"),
    # The front end's side
    mutant(
        "a failure is taken by the first sample alone",
        "SchedulerLink._take",
        "range(failure.stream_id, failure.stream_id + MAX_SAMPLES)",
        "range(failure.stream_id, failure.stream_id + 1)",
    ),
    mutant(
        "requests wait for a scheduler that is gone",
        "SchedulerLink.run",
        "self._fail_all(str(self.availability.lost(ended.reason)))",
        "",
    ),
    mutant(
        "samples are numbered as one",
        "ActiveRequest.queued",
        "output.sequence_id = sequence_id",
        "output.sequence_id = sequence_ids[0]",
    ),
    mutant(
        "a stream outlives its end in a front end",
        "SchedulerLink._take_delta",
        "del self._streams[output.sequence_id]",
        "",
    ),
    mutant("nobody is told that a client has gone", "SchedulerLink.cancel", "self._abort(request)", ""),
    # The HTTP API
    mutant("who has left an HTTP call is not noticed", "while_connected", "task.cancel()", "pass"),
    mutant("a request outlives its HTTP call", "begin_requests", "progress.active.cancel()", "pass"),
    mutant(
        "the usage of a whole answer lacks a sample",
        "_full_answer",
        "_usage(begun, writer)",
        "_usage(begun[1:], writer)",
    ),
    # The client library's side
    mutant(
        "what a client aborts is not told",
        "GenerateManyClient.abort",
        "self.send(pb.GenerateManyRequest(abort=pb.StreamAbort(stream_id=stream_id)))",
        "",
    ),
    mutant(
        "requests outlive a call that is lost",
        "GenerateManyCall._receive",
        "for stream_id in list(self._requests):\n    self._finish(stream_id, failure)",
        "",
    ),
    mutant("a timeout outlives its request", "GenerateManyCall._end", "request.timer.cancel()", "pass"),
    mutant(
        "a request ends with its first sample",
        "GenerateManyCall._take",
        "request.num_open == 0",
        "True",
    ),
)

PLANTING = Planting(
    MUTANTS,
    Path(__file__).with_name("found_by.json"),
    KNOWN_SEEDS,
    campaign="tests.sim.outputs.campaign",
    copied=("pagewire", "scheduler_service", "worker_service", "testing", "tests/sim"),
    planted_in=(
        "pagewire",
        "scheduler_service/api",
        "scheduler_service/links",
        "scheduler_service/serving",
    ),
)


if __name__ == "__main__":
    sys.exit(hunt_all(PLANTING, "python -m tests.sim.outputs.mutants"))
