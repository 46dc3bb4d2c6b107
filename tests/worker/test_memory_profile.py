"""Memory measurements, on a fake device whose memory is a number."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pagewire.common.wire.messages import StepPlan, StepResult
from worker_service.config import WorkerConfig
from worker_service.startup.device_memory import DeviceMemory, StepSize
from worker_service.startup.memory_profile import measure_memory
from worker_service.startup.pool_size import Counts, PoolSize

MIB, GIB = 1 << 20, 1 << 30
BLOCK_BYTES, STATE_BYTES, TOKEN_BYTES, BUFFER_BYTES = 2 * MIB, 3 * MIB, MIB // 8, 50 * MIB


@dataclass
class FakeMemory:
    """A card of 24 GiB, of which other processes use 1 GiB, and an allocator that keeps freed memory."""

    total: int = 24 * GIB
    others: int = GIB
    held: int = 15 * GIB  # by tensors: the weights
    kept: int = 15 * GIB
    peak: int = 0
    num_tokens: list[int] = field(default_factory=list)  # of each step

    def take(self, num_bytes: int) -> None:
        if self.others + self.held + num_bytes > self.total:
            raise MemoryError(f"{num_bytes} bytes")
        self.held += num_bytes
        self.peak = max(self.peak, self.held)
        self.kept = max(self.kept, self.held)

    def total_and_free(self) -> tuple[int, int]:
        return self.total, self.total - self.others - self.kept

    def allocated(self) -> int:
        return self.held

    def peak_of(self, operation: Callable[[], object]) -> int:
        self.peak = self.held
        operation()
        return self.peak

    def release(self) -> None:
        self.kept = self.held


class FakeRunner:
    """A fake runner that is its own computation."""

    num_graphs = 8

    @property
    def computation(self) -> "FakeRunner":
        return self

    def __init__(self, memory: FakeMemory, counts: Counts) -> None:
        self._memory = memory
        states = (counts.num_states + 1) * STATE_BYTES if counts.num_states else 0
        self._num_bytes = BUFFER_BYTES + (counts.num_blocks + 1) * BLOCK_BYTES + states
        memory.take(self._num_bytes)

    def __del__(self) -> None:
        self._memory.held -= self._num_bytes

    def execute(self, plan: StepPlan) -> StepResult:
        num_bytes = sum(plan.work_num_tokens) * TOKEN_BYTES
        self._memory.take(num_bytes)
        self._memory.held -= num_bytes
        self._memory.num_tokens.append(sum(plan.work_num_tokens))
        return StepResult(plan.epoch, plan.step)

    def run_graphs_uncaptured(self) -> None:
        self.execute(StepPlan(0, 0, work_num_tokens=(1,) * 8))


def measure(memory: FakeMemory, step: StepSize, state_bytes: int = 0) -> DeviceMemory:
    sizes = PoolSize(WorkerConfig(model="m"), BLOCK_BYTES, 1000, 2, state_bytes, max_model_len=1000)
    return measure_memory(
        memory,
        lambda counts: FakeRunner(memory, counts),
        step=step,
        sizes=sizes,
        block_size=16,
        staging_bytes=32 * MIB,
    )


@pytest.mark.parametrize("state_bytes", [0, STATE_BYTES])
def test_the_largest_steps_are_run_and_their_memory_counted(state_bytes: int) -> None:
    memory = FakeMemory()
    found = measure(memory, StepSize(2048, 16), state_bytes)
    # 16 rows of 128 tokens; 8 rows decode beside the runner's buffers; 8 graphs of 4 MiB for the driver.
    assert found == DeviceMemory(
        total=24 * GIB,
        others=GIB,
        weights=15 * GIB,
        step=BUFFER_BYTES + 2048 * TOKEN_BYTES,
        graphs=8 * TOKEN_BYTES + 8 * 4 * MIB,
        staging=32 * MIB,
    )
    assert memory.num_tokens == [2048, 8]
    assert memory.held == memory.kept == 15 * GIB, "nothing is left of it"


def test_a_step_that_does_not_fit_says_what_to_lower() -> None:
    memory = FakeMemory()
    with pytest.raises(
        ValueError, match=r"a step of 65536 tokens in 256 rows does not fit.*lower --max-num-batched-tok"
    ):
        measure(memory, StepSize(65536, 256))


def test_other_errors_are_raised() -> None:
    memory = FakeMemory()
    memory.take = lambda num_bytes: 1 // 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        measure(memory, StepSize(2048, 16))
