"""Moves beside computation, on CPU tensors: streams execute their operations late, in any legal order."""

import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire.common.wire.messages import FIRST_STATE_ID, StepPlan
from testing.worker.host_blocks import host_block
from tests.worker.fake_device import CPU, FakeDevice, Guard
from worker_service.cache.cache_engine import CacheEngine, CacheShape
from worker_service.cache.stream_moves import _BlockIds, _find_runs, num_staging_blocks

SHAPE = CacheShape(heads=((2, 8),) * 2, block_size=4, dtype=torch.bfloat16)
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 24, 16


@dataclass
class History:
    """Random plans that satisfy S3 and S4, with the expected content of every block."""

    seed: int
    eagerness: float | None = None
    dropped: Guard | None = None
    device_numbers: dict[int, int] = field(default_factory=dict)  # the expected content of each block
    host_numbers: dict[int, int] = field(default_factory=dict)
    held: list[tuple[int, set[int], set[int]]] = field(default_factory=list)  # step, its device and host blocks
    num_written: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        eagerness = self.rng.choice([0.02, 0.3, 0.6]) if self.eagerness is None else self.eagerness
        self.device = FakeDevice(self.seed, eagerness, self.dropped)
        self.cache = CacheEngine(
            SHAPE, NUM_DEVICE_BLOCKS, self.device.torch_device, NUM_HOST_BLOCKS, streams=self.device
        )
        for block in range(1, NUM_DEVICE_BLOCKS + 1):
            self.compute(block)

    def compute(self, block: int) -> None:
        """Write a block, as a forward pass does."""
        self.num_written += 1
        number = self.device_numbers[block] = self.num_written % 256  # exact in bfloat16
        self.device.compute.run(lambda: self.cache.storage[block].fill_(number))

    def free_blocks(self) -> tuple[list[int], list[int]]:
        device = set(self.device_numbers).difference(*(blocks for _, blocks, _ in self.held))
        host = set(range(1, NUM_HOST_BLOCKS + 1)).difference(*(blocks for _, _, blocks in self.held))
        return sorted(device), sorted(host)

    def step(self, step: int) -> None:
        rng = self.rng
        device, host = self.free_blocks()
        rng.shuffle(device)
        rng.shuffle(host)
        num_out = rng.randrange(min(len(device), len(host), 8) + 1)
        out = [device.pop() for _ in range(num_out)], [host.pop() for _ in range(num_out)]
        filled = [block for block in host if block in self.host_numbers]
        num_in = rng.randrange(min(len(device), len(filled), 8) + 1)
        sources = rng.choices(filled, k=num_in)
        targets = [device.pop() for _ in range(num_in)]
        num_copies = rng.randrange(min(len(device), 4) + 1)
        copied = rng.choices(device, k=num_copies) if device else []
        copy_targets = rng.sample(device, num_copies)
        plan = StepPlan(
            1,
            step,
            swap_out_device_blocks=tuple(out[0]),
            swap_out_host_blocks=tuple(out[1]),
            swap_in_host_blocks=tuple(sources),
            swap_in_device_blocks=tuple(targets),
            copy_source_blocks=tuple(copied),
            copy_target_blocks=tuple(copy_targets),
        )
        self.cache.check(plan)
        self.cache.move(plan)
        self.cache.copy(plan)
        moved_in = [self.host_numbers[block] for block in sources]
        self.host_numbers |= {host: self.device_numbers[block] for block, host in zip(*out, strict=True)}
        self.device_numbers |= dict(zip(targets, moved_in, strict=True))
        copies = [self.device_numbers[block] for block in copied]
        self.device_numbers |= dict(zip(copy_targets, copies, strict=True))
        if num_out or num_in:
            self.held.append((step, {*out[0], *targets}, {*out[1], *sources}))
        for block in rng.sample(device, min(len(device), rng.randrange(4))):
            self.compute(block)

    def acknowledge(self, num_steps: int) -> None:
        """Check that the blocks of all acknowledged moves have the expected content."""
        last_moved_step = self.cache.last_moved_step()
        assert last_moved_step <= num_steps
        for _, device, host in [moved for moved in self.held if moved[0] <= last_moved_step]:
            for block in host:
                assert numbers(host_block(self.cache, block)) == {self.host_numbers[block]}
            for block in device:
                assert numbers(self.cache.storage[block]) == {self.device_numbers[block]}
        self.held = [moved for moved in self.held if moved[0] > last_moved_step]
        assert self.cache.is_moving == bool(self.held)


def numbers(content: Tensor) -> set[float]:
    return set(content.flatten().tolist())


@pytest.fixture(
    params=[(100, 100, 100), (3, 2, 5), (1, 1, 1), (2, 0.4, 3)],
    ids=["one-chunk", "chunks", "single-blocks", "pieces of blocks"],
)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the limits, in blocks, of staging, of a transfer and of a slab."""
    staged, transferred, slab = request.param
    monkeypatch.setattr("worker_service.cache.stream_moves._SLAB_BYTES", slab * SHAPE.block_bytes)
    monkeypatch.setattr("worker_service.cache.stream_moves._MAX_STAGING_BYTES", staged * SHAPE.block_bytes)
    monkeypatch.setattr("worker_service.cache.stream_moves._MAX_TRANSFER_BYTES", int(transferred * SHAPE.block_bytes))


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize("seed", range(40))
def test_moves_beside_compute(seed: int) -> None:
    """Moves see all earlier computation and none of the later; an acknowledgement is never early."""
    run_history(History(seed))


def test_states_of_an_odd_size_move_too() -> None:
    device = FakeDevice(3)
    cache = CacheEngine(SHAPE, 4, CPU, 2, device, state_size=3, num_device_states=5, num_host_states=4)
    assert cache.states.stride() == (4, 1)
    cache.states[1:] = torch.arange(1.0, 6.0)[:, None]
    out = {"swap_out_device_blocks": (FIRST_STATE_ID + 4, 2), "swap_out_host_blocks": (FIRST_STATE_ID + 1, 1)}
    back = {"swap_in_host_blocks": (FIRST_STATE_ID + 1,), "swap_in_device_blocks": (FIRST_STATE_ID + 2,)}
    for step, columns in enumerate((out, back), start=1):
        plan = StepPlan(1, step, **columns)
        cache.check(plan)
        cache.move(plan)
        device.synchronize()
        assert cache.last_moved_step() == step
    cache.fill_states_with_nan([5])
    device.synchronize()
    assert cache.states[:5, 0].tolist() == [0, 1, 4, 3, 4]
    assert cache.states[5].isnan().all()


def test_moves_that_do_not_wait_for_compute_are_noticed() -> None:
    histories = [History(seed, dropped=Guard.MOVES_AFTER_COMPUTE) for seed in range(40)]
    with pytest.raises(AssertionError):
        list(map(run_history, histories))


def run_history(history: History) -> None:
    for step in range(1, 31):
        history.step(step)
        history.acknowledge(step)
    history.device.synchronize()
    history.acknowledge(30)
    assert history.cache.last_moved_step() == 30
    assert not history.held


def test_compute_waits_for_no_move() -> None:
    history = History(1, eagerness=0.0)
    history.device.synchronize()
    moves = {"swap_out_device_blocks": (1, 2), "swap_out_host_blocks": (3, 4)}
    history.cache.move(StepPlan(1, 1, **moves))
    history.compute(5)
    while history.device.compute.pending:
        assert history.device.compute.can_go_on
        history.device.compute.go_on()
    assert numbers(history.cache.storage[5]) == {history.device_numbers[5]}
    assert history.cache.is_moving
    assert len(history.device.moves.pending) > 0


def test_an_epoch_begins_when_everything_has_arrived() -> None:
    history = History(2)
    moves = {"swap_out_device_blocks": (1, 2), "swap_out_host_blocks": (3, 4)}
    history.cache.move(StepPlan(1, 5, **moves))
    target = host_block(history.cache, 4)
    history.cache.reset()
    assert not history.cache.is_moving
    assert history.cache.last_moved_step() == 0
    assert numbers(target) == {history.device_numbers[2]}


def transfers_of(history: History, plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of blocks in each transfer between device and host for a plan."""
    lengths: list[int] = []

    def find_runs(*arguments: Any) -> Iterator[Any]:
        for run in _find_runs(*arguments):
            lengths.append(run.num)
            yield run

    monkeypatch.setattr("worker_service.cache.stream_moves._find_runs", find_runs)
    history.cache.move(plan)
    history.device.synchronize()
    return lengths


def test_blocks_that_left_together_come_back_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(3)
    rng = random.Random(1)
    devices, hosts = tuple(range(1, 17)), rng.sample(range(1, 17), 16)
    for step, (first, last) in enumerate(((0, 5), (5, 9), (9, 16), (5, 16), (2, 3), (0, 16)), start=1):
        targets = rng.sample(hosts[first:last], last - first)
        columns = {"swap_out_device_blocks": devices[first:last], "swap_out_host_blocks": tuple(targets)}
        assert transfers_of(history, StepPlan(1, step, **columns), monkeypatch) == [last - first]
        back = {"swap_in_host_blocks": tuple(targets[:3][::-1]), "swap_in_device_blocks": (17, 18, 19)[: len(targets)]}
        assert transfers_of(history, StepPlan(1, step, **back), monkeypatch) == [min(3, len(targets))]
    apart = {"swap_in_host_blocks": (targets[0], targets[8]), "swap_in_device_blocks": (17, 18)}
    assert transfers_of(history, StepPlan(1, 7, **apart), monkeypatch) == [1, 1]


def test_ids_are_kept_until_the_device_has_read_them() -> None:
    device = SimpleNamespace(pinned=lambda shape, dtype: torch.empty(shape, dtype=dtype))
    is_done = False
    stream = SimpleNamespace(record=lambda: SimpleNamespace(query=lambda: is_done))
    ids = _BlockIds(device)
    held = weakref.ref(pinned := ids.put((3, 4)))
    ids.hold(pinned, stream)
    del pinned
    for is_done in (False, True):
        ids.put((5,))
        assert (held() is None) == is_done


def test_pieces() -> None:
    runs = [(run.first, run.place, run.num) for run in _find_runs([4, 5, 6, 9, 2, 3], 2, 1000)]
    assert runs == [(0, 4, 2), (2, 6, 1), (3, 9, 1), (4, 2, 2)]
    runs = [(run.first, run.place, run.num) for run in _find_runs([4, 5, 6, 7, 8, 9], 9, 3)]
    assert runs == [(0, 4, 2), (2, 6, 3), (5, 9, 1)]
    assert list(_find_runs([], 2, 3)) == []


def test_staging_is_bounded() -> None:
    assert num_staging_blocks(0, 1 << 20) == 0
    assert num_staging_blocks(1000, 1 << 20) == 32
    assert num_staging_blocks(1000, 1 << 30) == 1
    assert num_staging_blocks(5, 1 << 10) == 5
