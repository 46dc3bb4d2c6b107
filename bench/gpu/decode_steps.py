"""Times decode steps of a worker in this process. Its runner receives plans two steps ahead, as from a scheduler."""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagewire.common.wire.messages import StepPlan, StepResult
from testing.plans import PlannedStep, Row, num_blocks_needed, plan_for
from worker_service.config import WorkerConfig
from worker_service.engine import LoadedWorker
from worker_service.startup.loader import load_worker

DEPTH = 2
# Number of steps in which every row decodes, before the first timed step.
NUM_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class DecodeLoad:
    """Rows that decode together, each at about `context` positions, for a number of timed steps.

    With `num_steps` 0 and no warm-up, the load consists of prefills of this length only.
    """

    num_rows: int
    context: int
    num_steps: int
    num_warm_up_steps: int = NUM_WARM_UP_STEPS

    def rows(self, vocab_size: int, max_num_batched_tokens: int) -> list[Row]:
        """Return the rows. Prompts are computed one after the other, so the first row decodes alone until all rows
        decode."""
        num_prompt_steps = -(-self.num_rows * self.context // (max_num_batched_tokens - self.num_rows))
        num_further_steps = self.num_warm_up_steps + self.num_steps
        # Rows whose prompt is computed first decode until the prompts of all rows are computed.
        num_outputs = num_prompt_steps + num_further_steps + 1 if num_further_steps else 1
        rng, prompt_len = random.Random(0), max(1, self.context - self.num_warm_up_steps - self.num_steps // 2)
        return [Row(rng.choices(range(vocab_size), k=prompt_len), num_outputs) for _ in range(self.num_rows)]


class Worker:
    """A worker with random weights whose runner is called directly, one epoch after the other."""

    def __init__(
        self, model: Path, device: str, loads: Sequence[DecodeLoad], *, num_further_blocks: int = 0, **options: Any
    ) -> None:
        """Load a worker whose pool fits each of the loads, plus `num_further_blocks` device blocks."""
        config = WorkerConfig(
            model=str(model), device=device, load_format="dummy", max_num_seqs=max(load.num_rows for load in loads),
            **options,
        )  # fmt: skip
        self._budget = config.max_num_batched_tokens
        vocab_size = 100  # the token ids do not matter
        self._rows = {load: load.rows(vocab_size, self._budget) for load in loads}
        needed = max(num_blocks_needed(rows, config.choose_block_size()) for rows in self._rows.values())
        self.further_blocks = range(needed + 1, needed + 1 + num_further_blocks)
        self.loaded: LoadedWorker = load_worker(replace(config, num_device_blocks=needed + num_further_blocks), "bench")
        self._epoch = 0

    def begin(self) -> int:
        """Begin a new epoch without rows, and return its number."""
        self._epoch += 1
        self.loaded.runner.reset(self._epoch)
        return self._epoch

    def plans(self, load: DecodeLoad) -> list[PlannedStep]:
        """Return the plans of an epoch, beginning with the first prompt. The last `num_steps` plans are the ones to
        time."""
        rows = [replace(row, tables=[]) for row in self._rows[load]]
        steps = plan_for(self.loaded.ready, rows, self._budget, epoch=self._epoch)
        full = [index for index, step in enumerate(steps) if len(step.sampling_slots) == load.num_rows]
        return steps[: full[-1] + 1] if load.num_steps else steps

    def results(
        self,
        plans: Iterable[StepPlan],
        around_launch: Callable[[StepPlan], AbstractContextManager[None]] = lambda plan: nullcontext(),
    ) -> Iterator[tuple[float, StepResult]]:
        """Launch plans with at most `DEPTH` in flight, and yield each result with the time of its arrival.

        The time is from `time.perf_counter`. Each launch runs within the context manager `around_launch(plan)`.
        """
        under_way = []
        for plan in plans:
            with around_launch(plan):
                under_way.append(self.loaded.runner.launch(plan))
            if len(under_way) == DEPTH:
                result = under_way.pop(0).result()
                yield time.perf_counter(), result
        for step in under_way:
            result = step.result()
            yield time.perf_counter(), result


def time_steps(worker: Worker, load: DecodeLoad) -> list[float]:
    """Return the seconds between consecutive results of the timed steps, in which all rows decode."""
    worker.begin()
    plans = [step.plan for step in worker.plans(load)]
    times = []
    for at, result in worker.results(plans):
        assert not result.statuses, f"step {result.step} has rows that failed"
        times.append(at)
    timed = times[-load.num_steps - 1 :]
    return [after - before for before, after in itertools.pairwise(timed)]
