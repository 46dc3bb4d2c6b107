"""The scheduler: a state machine over requests, blocks and one worker. Events go in, plans and tokens come out.

It does no I/O and knows no clock: every event brings its own `now`, in seconds of any monotonic clock.
"""

from scheduler_service.core.plan import StepPlan, StepResult, WorkerCapacity
from scheduler_service.core.request import Request, SchedulerStats, TokenOutputs


class Scheduler:
    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, pipeline_depth: int = 2, max_waiting_requests: int = 4096, max_waiting_tokens: int = 4_194_304, enable_prefix_caching: bool = True) -> None: ...
    def add(self, request: Request, now: float) -> list[int]:
        """Queue a request; the ids of its sequences, one per sample. Raises AdmissionError."""
    def abort(self, tenant: str, request_id: str, now: float) -> TokenOutputs:
        """End every sequence of a request that has not ended. Raises KeyError if there is none."""
    def stop(self, sequence_id: int, num_output_tokens: int, now: float) -> TokenOutputs:
        """A stop string was seen: tokens past `num_output_tokens` are dropped. Nothing happens if it has ended."""
    def schedule(self, now: float) -> StepPlan | None: ...
    def complete(self, result: StepResult, now: float) -> TokenOutputs:
        """Raises StaleResultError (a ProtocolError) unless the result answers the oldest unacknowledged plan of this epoch."""
    def worker_joined(self, capacity: WorkerCapacity, epoch: int, now: float) -> TokenOutputs: ...
    def worker_lost(self, now: float) -> TokenOutputs: ...
    def worker_timed_out(self, now: float) -> TokenOutputs:
        """No worker for too long: every request ends with NO_WORKER."""
    def stats(self) -> SchedulerStats: ...
    def check(self) -> None:
        """Assert S1-S12; O(state)."""
    @property
    def has_requests(self) -> bool: ...
    @property
    def num_unacknowledged(self) -> int: ...
