"""A scheduler that has every event recorded."""

from typing import Any

from scheduler_service.core.lifecycle import Lifecycle
from scheduler_service.core.plan import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.request import BlockStored, KvEvent, KvEventCounts, Request, TokenOutputs
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.serving.recording import Recorder, failure, outcome


class RecordingScheduler:
    """Writes events down with what came of them; questions go straight to the scheduler.

    Cost, measured on one core: about 80 us a step at 256 decoding rows, beside 185 us of the core itself; most of it is
    the text of the result's tokens and the digest of the outputs.
    """

    def __init__(self, scheduler: Scheduler, recorder: Recorder) -> None:
        self._scheduler = scheduler
        self._recorder = recorder

    def add(self, request: Request, now: float) -> list[int]:
        return self._perform("add", (request,), now)

    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        return self._perform("abort", (tenant, request_id), now)

    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        return self._perform("stop", (sequence_id, num_output_tokens), now)

    def schedule(self, now: float) -> StepPlan | None:
        return self._perform("schedule", (), now)

    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        return self._perform("complete", (result,), now)

    def moved(self, step: int, now: float) -> None:
        self._perform("moved", (step,), now)

    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs:
        return self._perform("worker_joined", (capacity, epoch), now)

    def worker_lost(self, now: float) -> TokenOutputs:
        return self._perform("worker_lost", (), now)

    def worker_grace_ended(self, now: float) -> TokenOutputs:
        return self._perform("worker_grace_ended", (), now)

    def worker_timed_out(self, now: float) -> TokenOutputs:
        return self._perform("worker_timed_out", (), now)

    def flush_cache(self, now: float) -> None:
        self._perform("flush_cache", (), now)

    def _perform(self, name: str, arguments: tuple[Any, ...], now: float) -> Any:
        event = getattr(self._scheduler, name)
        if not self._recorder.is_open:
            return event(*arguments, now)
        try:
            value = event(*arguments, now)
        except Exception as error:
            self._recorder.write(name, now, arguments, failure(error))
            self._recorder.flush()
            raise
        self._recorder.write(name, now, arguments, outcome(value))
        if not self._scheduler.has_requests:
            self._recorder.flush()  # nothing may happen for long
        return value

    # Questions

    @property
    def max_sequence_tokens(self) -> int:
        return self._scheduler.max_sequence_tokens

    @property
    def state(self) -> Lifecycle:
        return self._scheduler.state

    def take_kv_events(self) -> list[KvEvent]:
        return self._scheduler.take_kv_events()

    def drop_kv_events(self) -> KvEventCounts:
        return self._scheduler.drop_kv_events()

    def kv_snapshot(self) -> list[BlockStored]:
        return self._scheduler.kv_snapshot()

    def check_sample(self) -> None:
        self._scheduler.check_sample()
