"""Helpers that run `pagewire bench` against a scheduler in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from pagewire.cli.command import main
from testing.core.simulated_worker import SimulatedWorker
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Stack, serve


class GoodLogitsWorker(FakeWorker):
    """A fake worker whose logits are never bad, because the prompts of the benchmark are random."""

    def _simulated_worker(self) -> SimulatedWorker:
        worker = super()._simulated_worker()
        worker.poisoned = frozenset()
        return worker


@contextlib.asynccontextmanager
async def stack_of(checkpoint: Path, step_seconds: float = 0.0, **options: object) -> AsyncIterator[Stack]:
    worker = await GoodLogitsWorker.started(checkpoint)
    async with serve(checkpoint, worker=worker, **options) as stack:
        stack.worker.step_seconds = step_seconds
        yield stack


async def bench(stack: Stack, *arguments: object) -> int:
    """Run `pagewire bench` on another thread, because the command needs its own event loop. Return its exit status."""
    return await asyncio.to_thread(main, ["bench", *map(str, arguments), "--url", stack.url])
