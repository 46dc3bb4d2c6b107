"""Runs a list of requests on one call of GenerateMany: as many at a time as the server takes, with results in order."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc

from pagewire import blocking_call, wire
from pagewire.completion import Completion, CompletionBuilder
from pagewire.errors import Cancelled, PagewireError, ResourceExhausted, Unavailable
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from pagewire.retry import Attempts

# Samples in flight at most: enough for the server to have some waiting, few enough to leave room in its queue.
MAX_IN_FLIGHT = 1024


class RequestBatch:
    """The requests of one caller that run together.

    A server whose queue is full gets fewer at a time. A request that the server refuses for another reason ends them
    all, with an error that names its place in the list.
    """

    def __init__(
        self,
        requests: Sequence[pb.GenerateRequest],
        stub: pb_grpc.SchedulerServiceStub,
        url: str,
        attempts: Attempts,
        on_news: Callable[[int, bool], None] = lambda num_tokens, has_ended: None,
    ) -> None:
        """Takes the requests. `on_news` is called with the tokens that have come, and whether a request has ended with
        them, in the thread that calls `run`."""
        self._requests = requests
        self._stub = stub
        self._url = url
        self._attempts = attempts
        self._on_news = on_news
        self._completions: dict[int, Completion] = {}
        self._waiting = deque(range(len(requests)))
        self._cancelled = threading.Event()
        self._call: _Call | None = None

    def run(self) -> list[Completion]:
        """Returns all results, in the order of the requests. Raises PagewireError. No exception leaves a request
        running."""
        while len(self._completions) < len(self._requests):
            self._call = _Call(self._stub, self._url, self._attempts)
            try:
                self._read(self._call)
            except Unavailable as failure:
                self._wait(failure)
                self._waiting.extendleft(sorted(self._call.indices, reverse=True))
            finally:
                self._call.close()
        return [self._completions[index] for index in range(len(self._requests))]

    def cancel(self) -> None:
        """Lets a `run` in another thread end soon, with an error."""
        self._cancelled.set()
        if self._call is not None:
            self._call.close()

    def _read(self, call: "_Call") -> None:
        """Reads a call until all requests have ended. Raises PagewireError for a request that is refused, and for a
        call that breaks."""
        self._submit(call)
        for message in call.messages():
            for entry in message.deltas:
                self._take(call, entry)
            refused = {call.drop(failure.stream_id): wire.decode_failure(failure) for failure in message.failures}
            if refused:
                self._put_back(call, refused)
            self._submit(call)
            if len(self._completions) == len(self._requests):
                return
        raise Unavailable(f"the server at {self._url} has shut down", code=grpc.StatusCode.UNAVAILABLE)

    def _submit(self, call: "_Call") -> None:
        if self._cancelled.is_set():
            raise Cancelled("the requests were cancelled", code=grpc.StatusCode.CANCELLED)
        while self._waiting and call.has_room_for(self._requests[self._waiting[0]]):
            index = self._waiting.popleft()
            call.submit(index, self._requests[index])

    def _take(self, call: "_Call", entry: pb.StreamDelta) -> None:
        running = call.running[entry.stream_id - entry.delta.index]
        running.builder.add(wire.decode_output(entry.delta), time.monotonic())
        running.num_open -= entry.delta.HasField("usage")
        if running.num_open == 0:
            call.drop(running.stream_id)
            call.widen()
            self._completions[running.index] = running.builder.finish(time.monotonic())
        self._on_news(len(entry.delta.token_ids), running.num_open == 0)

    def _put_back(self, call: "_Call", refused: Mapping[int, PagewireError]) -> None:
        """Lets requests that the server cannot take now wait until others of the list have ended, or else for as long
        as the server says. Raises the failure where waiting does not help."""
        self._waiting.extendleft(sorted(refused, reverse=True))
        index, failure = min(refused.items(), key=lambda item: isinstance(item[1], ResourceExhausted))
        if isinstance(failure, ResourceExhausted) and call.indices:
            call.narrow()
        else:
            self._wait(failure, f"prompt {index}: " if len(self._requests) > 1 else "")

    def _wait(self, failure: PagewireError, prefix: str = "") -> None:
        """Waits until the next attempt. Raises the failure if there is none."""
        named = type(failure)(
            f"{prefix}{failure}",
            code=failure.code,
            field_violations=failure.field_violations,
            retry_delay=failure.retry_delay,
        )
        self._cancelled.wait(self._attempts.next_delay(named))


class _Running:
    """A request in flight: its place in the list, its first stream, and the output that it has had so far."""

    def __init__(self, index: int, stream_id: int, num_samples: int, started_at: float) -> None:
        self.index = index
        self.stream_id = stream_id
        self.num_samples = num_samples
        self.num_open = num_samples
        self.builder = CompletionBuilder(num_samples, started_at)


class _Call:
    """One GenerateMany call, while it lasts."""

    def __init__(self, stub: pb_grpc.SchedulerServiceStub, url: str, attempts: Attempts) -> None:
        """Begins the call. Raises Cancelled if the client was closed."""
        self._url = url
        self.running: dict[int, _Running] = {}  # by their first streams
        self._next_stream_id = 0
        self._num_samples = 0  # in flight
        self._max_samples = MAX_IN_FLIGHT
        self._outbox: queue.SimpleQueue[pb.GenerateManyRequest | None] = queue.SimpleQueue()
        try:
            self._call = stub.GenerateMany(iter(self._outbox.get, None), timeout=attempts.timeout_s)
        except ValueError:  # gRPC's word for a channel that another task has closed
            raise Cancelled("the client was closed", code=grpc.StatusCode.CANCELLED) from None

    @property
    def indices(self) -> list[int]:
        """The places in the list of all requests in flight."""
        return [running.index for running in self.running.values()]

    def messages(self) -> Iterator[pb.GenerateManyResponse]:
        """Yields the server's messages. Raises PagewireError."""
        try:
            yield from blocking_call.responses(self._call)
        except grpc.RpcError as error:
            raise wire.decode_error(error, self._url) from None

    def has_room_for(self, request: pb.GenerateRequest) -> bool:
        return self._num_samples == 0 or self._num_samples + wire.num_samples(request) <= self._max_samples

    def submit(self, index: int, request: pb.GenerateRequest) -> None:
        running = _Running(index, self._next_stream_id, wire.num_samples(request), time.monotonic())
        self.running[running.stream_id] = running
        self._next_stream_id += running.num_samples
        self._num_samples += running.num_samples
        submission = pb.Submission(stream_id=running.stream_id, request=request)
        self._outbox.put(pb.GenerateManyRequest(submit=submission))

    def drop(self, stream_id: int) -> int:
        """Forgets a request that has ended, and returns its place in the list."""
        running = self.running.pop(stream_id)
        self._num_samples -= running.num_samples
        return running.index

    def narrow(self) -> None:
        """Allows no more requests at a time than there are now."""
        self._max_samples = max(1, self._num_samples)

    def widen(self) -> None:
        self._max_samples = min(self._max_samples + 1, MAX_IN_FLIGHT)

    def close(self) -> None:
        """Ends the call, which aborts every request in flight."""
        self._outbox.put(None)
        self._call.cancel()
