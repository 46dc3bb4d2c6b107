"""Steps that do not fit into memory: the order of their parts in a block model, and a runner's results."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.common.wire.messages import Pooling, RowOpening, RowStatus, SamplingParams, StepPlan, StepResult
from pagewire.network.source import load_config
from testing.checkpoints.families import make_checkpoint
from testing.models import load_model
from tests.worker.device_attention import DeviceAttention
from tests.worker.device_sampler import SAMPLER
from tests.worker.fake_device import CPU, FakeDevice, as_kernel
from tests.worker.runners import device_runner, host_runner
from worker_service.attention.backends.torch import TorchAttention
from worker_service.cache.cache_engine import CacheEngine
from worker_service.device.cuda import is_fatal, is_out_of_memory
from worker_service.rows.parts import run_in_parts
from worker_service.rows.table import TableLimits
from worker_service.rows.working_rows import WorkingRows
from worker_service.runner import ModelRunner
from worker_service.startup.loader import attention_shape, cache_shape

pytestmark = pytest.mark.one_of_each

BLOCK_SIZE = 4


@dataclass
class Planned:
    """A row of the block model: it computes [start, end) of its table."""

    start: int
    end: int
    table: list[int]
    samples: bool

    def places(self, start: int, end: int) -> list[tuple[int, int]]:
        return [(self.table[position // BLOCK_SIZE], position % BLOCK_SIZE) for position in range(start, end)]


@dataclass
class Memory:
    """Rows in slots, many of which use blocks that other rows of the step write, and insufficient memory."""

    seed: int
    rows: dict[int, Planned] = field(default_factory=dict)
    filled: set[tuple[int, int]] = field(default_factory=set)
    num_blocks: int = 0
    given_up: dict[int, int] = field(default_factory=dict)  # slot: the first position that was given up
    num_calls: int = 0
    num_freed: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        slots = rng.sample(range(20), rng.randrange(1, 9))
        for slot in slots:
            self.rows[slot] = self._row(rng)
        total = sum(row.end - row.start for row in self.rows.values())
        self.max_tokens = rng.randrange(1, total + 1)
        self.max_failures = rng.choice([0, 0, 5])  # of no visible cause
        self.stubborn: dict[int, int] = {}  # slot: a position that is never computed
        for slot in rng.sample(slots, rng.choice([0, 0, 1, min(2, len(slots))])):
            row = self.rows[slot]
            self.stubborn[slot] = rng.randrange(row.start, row.end)

    def _row(self, rng: random.Random) -> Planned:
        table: list[int] = []
        if self.rows and rng.random() < 0.7:  # full blocks of another row, computed before or in this step
            other = rng.choice(list(self.rows.values()))
            table = other.table[: rng.randrange(other.end // BLOCK_SIZE + 1)]
        start = len(table) * BLOCK_SIZE
        old = rng.choice([0, 0, rng.randrange(10)])
        end = start + old + rng.choice([1, rng.randrange(1, 25)])
        while len(table) * BLOCK_SIZE < end:
            self.num_blocks += 1
            table.append(self.num_blocks)
        row = Planned(start + old, end, table, rng.random() < 0.7)
        self.filled.update(row.places(start, start + old))
        return row

    def working_rows(self) -> WorkingRows:
        slots = sorted(self.rows)
        rows = [self.rows[slot] for slot in slots]
        return WorkingRows(
            np.array(slots),
            np.array([row.start for row in rows]),
            np.array([row.end - row.start for row in rows]),
            np.array([row.samples for row in rows]),
        )

    def compute(self, part: WorkingRows) -> dict[int, tuple[int, int]]:
        self.num_calls += 1
        pieces = dict(zip(part.slots.tolist(), zip(part.starts.tolist(), part.ends.tolist(), strict=True), strict=True))
        assert list(pieces) == sorted(pieces)
        if sum(end - start for start, end in pieces.values()) > self.max_tokens:
            raise MemoryError("too many tokens")
        if any(slot in pieces and pieces[slot][1] > position for slot, position in self.stubborn.items()):
            raise MemoryError("a stubborn row")
        if self.max_failures and self.rng.random() < 0.3:
            self.max_failures -= 1
            raise MemoryError("no visible cause")
        for slot, (start, end) in pieces.items():
            assert slot not in self.given_up
            self.filled.update(self.rows[slot].places(start, end))
        for slot, (_, end) in pieces.items():
            unread = set(self.rows[slot].places(0, end)).difference(self.filled)
            assert not unread, f"slot {slot} reads {unread} before it is written"
        for (slot, (_, end)), samples in zip(pieces.items(), part.samples.tolist(), strict=True):
            assert samples == (self.rows[slot].samples and end == self.rows[slot].end)
        return pieces

    def free(self) -> None:
        self.num_freed += 1

    def give_up(self, part: WorkingRows) -> None:
        ((slot, start, end, samples),) = zip(part.slots, part.starts, part.ends, part.samples, strict=True)
        row = self.rows[int(slot)]
        assert (end, samples) == (row.end, row.samples)
        self.filled.update(row.places(start, end))
        assert slot not in self.given_up
        self.given_up[int(slot)] = int(start)


@pytest.mark.parametrize("first_seed", range(0, 2000, 250))
def test_parts_keep_the_order_of_blocks(first_seed: int) -> None:
    num_given_up = num_cut = 0
    for seed in range(first_seed, first_seed + 250):
        memory = Memory(seed)
        rows = memory.working_rows()
        parts = run_in_parts(
            rows,
            memory.compute,
            is_out_of_memory=lambda error: isinstance(error, MemoryError),
            free_memory=memory.free,
            give_up=memory.give_up,
        )
        reached = {slot: row.start for slot, row in memory.rows.items()}
        for part in parts:
            for slot, (start, end) in part.result.items():
                assert start == reached[slot], "a row's pieces come in order and once"
                reached[slot] = end
                num_cut += end < memory.rows[slot].end
        assert memory.given_up.keys() >= memory.stubborn.keys()
        assert reached == {slot: memory.given_up.get(slot, row.end) for slot, row in memory.rows.items()}
        if not memory.max_failures:
            for slot in memory.given_up.keys() & memory.stubborn.keys():
                assert memory.given_up[slot] <= memory.stubborn[slot]
        assert memory.num_calls <= 3 * rows.num_new_tokens.sum() + 1
        num_given_up += len(memory.given_up)
    assert num_given_up > 50
    assert num_cut > 300


def test_rows_that_must_be_computed_whole_are_not_cut() -> None:
    num_given_up = 0
    for seed in range(200):
        memory = Memory(seed)
        parts = run_in_parts(
            memory.working_rows(),
            memory.compute,
            is_out_of_memory=lambda error: isinstance(error, MemoryError),
            free_memory=memory.free,
            give_up=memory.give_up,
            cuts_rows=False,
        )
        computed = {slot: place for part in parts for slot, place in part.result.items()}
        assert sum(len(part.result) for part in parts) == len(computed), "each row is in one part"
        whole = {slot: (row.start, row.end) for slot, row in memory.rows.items() if slot not in memory.given_up}
        assert computed == whole
        num_given_up += len(memory.given_up)
    assert num_given_up > 50


def test_memory_that_suffices_costs_nothing() -> None:
    memory = Memory(1)
    memory.max_tokens, memory.stubborn, memory.max_failures = 1000, {}, 0
    arguments: dict[str, Any] = {"free_memory": memory.free, "give_up": memory.give_up}
    (part,) = run_in_parts(memory.working_rows(), memory.compute, is_out_of_memory=is_out_of_memory, **arguments)
    assert part.rows.slots.tolist() == sorted(memory.rows)
    assert (memory.num_calls, memory.num_freed) == (1, 0)


def test_other_errors_are_raised() -> None:
    def compute(rows: WorkingRows) -> None:
        raise ValueError("of another kind")

    memory = Memory(1)
    arguments: dict[str, Any] = {"free_memory": memory.free, "give_up": memory.give_up}
    with pytest.raises(ValueError, match="of another kind"):
        run_in_parts(memory.working_rows(), compute, is_out_of_memory=is_out_of_memory, **arguments)


def test_errors_of_memory_are_told_from_those_of_the_device() -> None:
    with pytest.raises(RuntimeError) as of_a_cpu:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 50)
    lost = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    lost.error_code = 700
    exhausted = torch.AcceleratorError("CUDA error: out of memory")
    exhausted.error_code = 2
    cases = [
        (of_a_cpu.value, True, False),
        (of_numpy.value, True, False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True, False),
        (exhausted, True, False),
        (lost, False, True),
        (RuntimeError("shapes do not fit"), False, False),
    ]
    for error, exhausts, kills in cases:
        assert (is_out_of_memory(error), is_fatal(error)) == (exhausts, kills), error


# Runners whose model has too little memory for large steps


POISON = 150  # a step with this token never fits
SAMPLED = SamplingParams(temperature=0.8, num_logprobs=2, num_prompt_logprobs=1)
LISTED = replace(SAMPLED, num_logprobs=3, logprob_token_ids=(9, 0, 70))
EVERY_TOKEN = SamplingParams(temperature=0.8, num_logprobs=1000, num_prompt_logprobs=1000)
BEAM = SamplingParams(num_candidates=3)
MEAN = SamplingParams(pooling=Pooling.MEAN)
KINDS = ("plain", "cuda")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen2", seed=7)


def make_runner(
    kind: str, path: Path, max_tokens: int, monkeypatch: pytest.MonkeyPatch, *, splits_steps: bool = True
) -> ModelRunner:
    """Return a runner. The GPU runner executes operations at their launch, when memory is allocated."""
    config = load_config(path)
    model = load_model(path, dtype=torch.float32, device=CPU)
    limits = TableLimits(
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        max_model_len=256,
        block_size=16,
        num_device_blocks=100,
        vocab_size=config.vocab_size,
    )
    shape = cache_shape(config, (), 16, torch.float32)
    forward = model.forward

    @as_kernel
    def is_poisoned(token_ids: torch.Tensor) -> bool:
        return POISON in token_ids

    def scarce_forward(token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, *states: Any) -> torch.Tensor:
        if len(token_ids) > max_tokens or is_poisoned(token_ids):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return forward(token_ids, positions, attend, *states)

    monkeypatch.setattr(model, "forward", scarce_forward)
    if kind == "plain":
        cache, attention = CacheEngine(shape, 100, CPU), attention_shape(config, 16, torch.float32, torch.float32)
        return host_runner(model, cache, TorchAttention(attention, CPU), limits, splits_steps=splits_steps)
    device = FakeDevice(1, eagerness=1.0)
    cache = CacheEngine(shape, 100, CPU, 0, device)
    return device_runner(model, cache, DeviceAttention(), SAMPLER, limits, device, splits_steps=splits_steps)


def opening(slot: int, tokens: list[int], computed: int, blocks: tuple[int, ...], sampling: SamplingParams) -> Any:
    return RowOpening(slot, slot, tuple(tokens), len(tokens), computed, blocks, sampling, seed=slot, sample_index=0)


def run_steps(
    runner: ModelRunner, poisoned_slot: int = -1, reporting: Sequence[SamplingParams] = ()
) -> list[StepResult]:
    """Run rows of every kind; slots 0 and 3 use blocks that slot 2 computes in the same step."""
    rng = random.Random(5)
    shared = [rng.randrange(POISON) for _ in range(48)]
    tails = {slot: [rng.randrange(POISON) for _ in range(4)] for slot in range(4)}
    tokens = {0: shared[:32] + tails[0], 1: tails[1] * 5, 2: shared + tails[2], 3: shared[:16] + tails[3] * 6}
    if poisoned_slot >= 0:
        tokens[poisoned_slot][-1] = POISON
    openings = (
        opening(0, tokens[0], 32, (1, 2, 5), SAMPLED),
        opening(1, tokens[1], 0, (6, 7), SAMPLED),
        opening(2, tokens[2], 0, (1, 2, 3, 4), SamplingParams()),
        opening(3, tokens[3], 16, (1, 8, 9), BEAM),
        opening(4, tokens[1][::-1], 0, (10, 11), MEAN),
        opening(5, tokens[0], 32, (1, 2, 12), SamplingParams(pooling=Pooling.LAST)),
        *(opening(6 + i, tokens[1], 0, (13 + 2 * i, 14 + 2 * i), sampling) for i, sampling in enumerate(reporting)),
    )
    runner.reset(1)
    work = {0: 4, 1: 20, 2: 48, 3: 24, 4: 13, 5: 4} | {6 + i: 20 for i in range(len(reporting))}
    first = StepPlan(1, 1, openings=openings, work_slots=tuple(work), work_num_tokens=tuple(work.values()))
    # Slots 2 and 4 reach their ends in the second step.
    later = [StepPlan(1, 2, work_slots=(2, 4), work_num_tokens=(4, 7)), StepPlan(1, 3), StepPlan(1, 4)]
    return [runner.execute(plan) for plan in (first, *later)]


def assert_equal(found: StepResult, expected: StepResult) -> None:
    assert (found.statuses, found.token_ids) == (expected.statuses, expected.token_ids)
    assert found.candidates.token_ids == expected.candidates.token_ids
    assert found.candidates.logprobs == pytest.approx(expected.candidates.logprobs, abs=1e-4)
    pairs = [(found.logprobs, expected.logprobs)]
    for chunk, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (chunk.slot, chunk.first_position) == (other.slot, other.first_position)
        pairs.append((chunk.logprobs, other.logprobs))
    assert len(found.embeddings) == len(expected.embeddings)
    for embedding, other in zip(found.embeddings, expected.embeddings, strict=True):
        assert np.frombuffer(embedding, "<f4") == pytest.approx(np.frombuffer(other, "<f4"), abs=1e-5)
    for columns, others in pairs:
        assert (columns.ranks, columns.top_token_ids) == (others.ranks, others.top_token_ids)
        assert columns.chosen == pytest.approx(others.chosen, abs=1e-4)
        assert columns.top_logprobs == pytest.approx(others.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [95, 50, 33, 7, 3, 1])
def test_a_step_in_parts_is_the_same_step(
    kind: str, checkpoint: Path, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporting = (LISTED, EVERY_TOKEN)
    expected = run_steps(make_runner("plain", checkpoint, 1000, monkeypatch), reporting=reporting)
    found = run_steps(make_runner(kind, checkpoint, max_tokens, monkeypatch), reporting=reporting)
    assert expected[0].prompt_logprobs
    assert expected[0].candidates.token_ids
    assert [len(result.embeddings) for result in expected] == [1, 1, 0, 0]
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_does_not_fit_alone_fails_where_it_samples(
    kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run_steps(make_runner("plain", checkpoint, 1000, monkeypatch))
    runner = make_runner(kind, checkpoint, 1000, monkeypatch)
    found = run_steps(runner, poisoned_slot=2)
    assert_equal(found[0], expected[0])  # its last token is computed in the second step
    for one, other in zip(found[1:], expected[1:], strict=True):
        slots = [0, 1, 2] if len(other.token_ids) == 3 else [0, 1]
        statuses = [RowStatus.OUT_OF_MEMORY if slot == 2 else RowStatus.OK for slot in slots]
        assert one.statuses == (*statuses, *[RowStatus.OK] * len(other.embeddings))
        assert one.token_ids == tuple(
            token_id for slot, token_id in zip(slots, other.token_ids, strict=True) if slot != 2
        )
        assert len(one.embeddings) == len(other.embeddings)
    # After its release, the slot works as before.
    again = (opening(2, [1, 2, 3], 0, (20,), SamplingParams()),)
    result = runner.execute(StepPlan(1, 5, (2,), openings=again, work_slots=(0, 1, 2), work_num_tokens=(0, 0, 3)))
    assert (result.statuses, len(result.token_ids)) == ((), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_alone_fails_though_a_piece_of_it_was_computed(
    kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(kind, checkpoint, 1000, monkeypatch)
    runner.reset(1)
    row = opening(0, [3, POISON], 0, (1,), SamplingParams())
    result = runner.execute(StepPlan(1, 1, openings=(row,), work_slots=(0,), work_num_tokens=(2,)))
    assert (result.statuses, result.token_ids) == ((RowStatus.OUT_OF_MEMORY,), ())


@pytest.mark.parametrize("kind", KINDS)
def test_reader_of_a_failed_rows_blocks_gets_no_token(
    kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(kind, checkpoint, 1000, monkeypatch)
    runner.reset(1)
    tokens = [3, POISON, *range(30)]
    rows = (
        opening(0, [*tokens[:16], 9], 16, (1, 3), replace(SAMPLED, num_prompt_logprobs=None)),
        opening(1, tokens, 0, (1, 2, 10), SAMPLED),
        opening(2, [4, 5, 6], 0, (4,), SamplingParams()),
    )
    plan = StepPlan(1, 1, openings=rows, work_slots=(0, 1, 2), work_num_tokens=(1, 20, 3))
    result = runner.execute(plan)
    assert result.statuses == (RowStatus.NAN_LOGITS, RowStatus.OK)
    assert len(result.token_ids) == 1
    (chunk,) = result.prompt_logprobs
    assert (chunk.slot, chunk.first_position, len(chunk.logprobs.chosen)) == (1, 1, 20)
    assert [math.isnan(value) for value in chunk.logprobs.chosen] == [False] * 1 + [True] * 19
    assert len(chunk.logprobs.top_token_ids) == 20
    assert runner._cache.storage[2].isnan().any()
    last = runner.execute(StepPlan(1, 2, work_slots=(0, 1, 2), work_num_tokens=(0, 12, 0)))
    assert last.statuses == (RowStatus.OUT_OF_MEMORY,)
    assert runner.execute(StepPlan(1, 3)).statuses == (RowStatus.OUT_OF_MEMORY,)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_profiles_split_nothing(kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(kind, checkpoint, 50, monkeypatch, splits_steps=False)
    with pytest.raises(torch.OutOfMemoryError):
        run_steps(runner)
