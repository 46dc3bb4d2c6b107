"""The startup progress that a worker reports, from its service to the scheduler's timers and messages."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from pagewire.common.wire.messages import WorkerCapacity, WorkerStarting
from pagewire.common.wire.transport.dialling import Dialler
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from scheduler_service.links.worker.worker_link import WorkerLink
from scheduler_service.metrics import Metrics
from scheduler_service.serving.availability import WorkerAvailability
from scheduler_service.serving.step_loop import StepLoop
from testing.fake_worker import FakeWorker
from testing.starting_worker import StartingWorker
from tests.contract.hand_clock import ManualClock


class Scheduling:
    """A scheduler's worker link and step loop, with timers that the test fires."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        core = Scheduler(SchedulerOptions(max_num_seqs=64, max_num_batched_tokens=64, max_model_len=256))
        self.step_loop = StepLoop(core, [Metrics()], worker_timeout=60.0, clock=clock)
        self.availability: WorkerAvailability = self.step_loop.availability
        self._heard: asyncio.Queue[tuple[str | WorkerStarting, int | None]] = asyncio.Queue()
        self._listened_to = self.availability.worker_missing
        self.availability.worker_missing = self._hear

    def _hear(self, reason: str | WorkerStarting, rank: int | None) -> None:
        self._listened_to(reason, rank)
        self._heard.put_nowait((reason, rank))

    async def hears(self, reason: str | WorkerStarting, rank: int | None = None) -> None:
        """Wait until the link has reported `reason`."""
        async with asyncio.timeout(20):
            while await self._heard.get() != (reason, rank):
                pass

    async def joined(self) -> None:
        await asyncio.wait_for(self.availability.wait_for_first_worker(), 20)


@asynccontextmanager
async def scheduling(*workers: StartingWorker) -> AsyncIterator[Scheduling]:
    """Run a scheduler whose worker has the given ranks."""
    scheduling = Scheduling(ManualClock())
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.stop)
        diallers = [Dialler(f"127.0.0.1:{worker.port}", ()) for worker in workers]
        for dialler in diallers:
            stack.push_async_callback(dialler.close)
        link = WorkerLink(
            diallers, scheduling.step_loop.exchange, instance_id="one", model_digest=b"digest", pipeline_depth=2
        )
        scheduling.availability.start_timers()
        running = asyncio.create_task(link.run())
        yield scheduling
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def worker(rank: int = 0, size: int = 1) -> StartingWorker:
    fake = FakeWorker(b"digest", tensor_parallel_rank=rank, tensor_parallel_size=size)
    return StartingWorker(WorkerCapacity(**fake.capacity))


async def test_a_worker_that_starts_is_waited_for_while_it_comes_further() -> None:
    starting = worker()
    async with scheduling(starting) as scheduler:
        for doing in ("importing torch", "compiling kernels, 1 of 8 units", "compiling kernels, 2 of 8 units"):
            starting.come_further(doing)
            await scheduler.hears(WorkerStarting(doing))
            scheduler.clock.end_last()
            assert scheduler.availability.refusal() == ""
            assert scheduler.availability.missing_reason == f"the worker is still starting, {doing}"
        await scheduler.hears(WorkerStarting(doing))  # the same as before, so the worker counts as stuck
        scheduler.clock.end_last()
        assert scheduler.availability.refusal() == "no worker has been connected for 60 s; try again later"
        starting.be_ready()
        while not scheduler.availability.is_serving:
            await scheduler.availability.changed.wait()
            scheduler.availability.changed.clear()
        assert scheduler.availability.missing_reason == ""


async def test_each_rank_says_what_it_does() -> None:
    first, second = worker(0, 2), worker(1, 2)
    async with scheduling(first, second) as scheduler:
        second.come_further("loading weights")
        await scheduler.hears(WorkerStarting("loading weights"), 1)
        first.come_further("compiling kernels")
        await scheduler.hears(WorkerStarting("compiling kernels"), 0)
        assert scheduler.availability.missing_reason == (
            "rank 0: the worker is still starting, compiling kernels; "
            "rank 1: the worker is still starting, loading weights"
        )
        first.be_ready()
        await scheduler.hears("the worker is ready, another rank is not", 0)
        scheduler.clock.end_last()
        assert scheduler.availability.refusal() == "", "rank 1 has come further"
        second.be_ready()
        await scheduler.joined()
