"""A listener of a worker link that records its events, and sample plans for the link."""

import asyncio

from pagewire.common.wire.messages import RowOpening, SamplingParams, StepResult, WorkerCapacity, WorkerStarting
from scheduler_service.links.worker.worker_session import Session


class Listener:
    """A listener that is also the `availability` of its step loop. Events are tuples of a name and a value."""

    def __init__(self) -> None:
        self.availability = self
        self.events: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: Session) -> None:
        self.events.put_nowait(("ready", (capacity, link)))

    def moved(self, step: int) -> None:
        self.events.put_nowait(("moved", step))

    def grammar_ready(self, grammar_id: int, error: str) -> None:
        self.events.put_nowait(("grammar", (grammar_id, error)))

    def result(self, result: StepResult, age: float) -> None:
        self.events.put_nowait(("result", result.step))

    def worker_lost(self, reason: str) -> None:
        self.events.put_nowait(("lost", reason))

    def worker_missing(self, reason: str | WorkerStarting, rank: int | None) -> None:
        self.events.put_nowait(("missing", reason if rank is None else (rank, reason)))

    async def next(self) -> tuple[str, object]:
        return await asyncio.wait_for(self.events.get(), 20)


SWAP_OUT = {"swap_out_device_blocks": (1, 2), "swap_out_host_blocks": (4, 3)}
WORK = {"work_slots": (0,), "work_num_tokens": (4,)}


def opening(num_computed_tokens: int = 0) -> RowOpening:
    return RowOpening(0, 7, tuple(range(9)), 9, num_computed_tokens, (1, 2, 3), SamplingParams(), 0, 0)
