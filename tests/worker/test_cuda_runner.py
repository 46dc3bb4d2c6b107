"""The runner on a device that executes streams in random legal orders, compared with the plain runner.

Both runners get the same plans, which the scheduler's core makes, and every result is compared.
"""

import math
import random
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewire.common.grammars import GrammarCompiler
from pagewire.common.grammars.matcher import MaskCost
from pagewire.common.wire.messages import (
    FIRST_STATE_ID,
    Candidates,
    GrammarKind,
    GrammarReport,
    LayerGroup,
    Logprobs,
    Pooling,
    RowOpening,
    RowStatus,
    SamplingParams,
    StepPlan,
    StepResult,
    WorkerCapacity,
    WorkerProtocolError,
)
from pagewire.common.wire.worker_wire import decode_request, encode_request
from pagewire.kernels import states
from pagewire.network.layer_groups import layer_groups
from pagewire.network.source import load_config
from scheduler_service.core.cost import PreemptionMode
from scheduler_service.core.request import (
    AdmissionError,
    BeamParams,
    EarlyStopping,
    EndReason,
    Grammar,
    Request,
    TokenOutputs,
)
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions
from testing.checkpoints.families import FAMILIES, make_checkpoint
from testing.models import load_model
from testing.plans import GREEDY, Row, plan_steps
from testing.seeds import seeded
from tests.worker.device_attention import DeviceAttention
from tests.worker.device_sampler import SAMPLER
from tests.worker.fake_device import CPU, FakeDevice, FakeGraph, Guard, as_kernel
from tests.worker.late_queue import LateQueue
from tests.worker.letters import END_TOKEN_ID, letters_tokenizer
from tests.worker.runners import device_runner, host_runner
from worker_service.attention.backends.torch import TorchAttention
from worker_service.cache.cache_engine import CacheEngine
from worker_service.config import WorkerConfig
from worker_service.device.computation import StepTimer
from worker_service.device.graphs import graph_sizes
from worker_service.device.mixed_graphs import token_counts
from worker_service.engine import Engine, EngineSession, LoadedWorker, Outcome
from worker_service.epoch_grammars import CompileThread, EpochGrammars
from worker_service.models.communicator import SingleRank
from worker_service.models.torch_operations import ExpertProduct, Operations, multiply_all
from worker_service.rows.table import TableLimits
from worker_service.rows.working_rows import WorkingRows
from worker_service.runner import ModelRunner
from worker_service.startup import loader
from worker_service.startup.loader import attention_shape, cache_shape, load_worker
from worker_service.step import LaunchedStep
from worker_service.streams import StreamWork

pytestmark = pytest.mark.thorough

VOCAB_SIZE, MAX_MODEL_LEN, NUM_STATES = 151, 256, 14
READY = WorkerCapacity("w", b"m", VOCAB_SIZE, 256, 4, 60, 1, 6, 48, "cuda", "float32", "reference")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(root / family, family, seed=7) for family in FAMILIES}


class DeviceOperations(Operations):
    """Plain torch operations as on a GPU, where the host does not know which experts are chosen, nor which states."""

    convolve = staticmethod(as_kernel(states.convolve))
    apply_delta_rule = staticmethod(as_kernel(states.apply_delta_rule))

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        return lambda x, ids: multiply_all(x, weights, ids, biases)


class Pair:
    """A plain runner and a runner on a fake device, with the same model. `num_blocks` is for each layer group."""

    def __init__(
        self,
        path: Path,
        seed: int,
        *,
        block_size: int = 4,
        num_blocks: int = 60,
        num_host_blocks: int = 0,
        max_num_seqs: int = 6,
        max_num_batched_tokens: int = 48,
        max_graph_batch_size: int = 0,
        max_graph_tokens: int = 0,
        device: FakeDevice | None = None,
        grammars: tuple[EpochGrammars, EpochGrammars] | None = None,
    ) -> None:
        config = load_config(path)
        model = load_model(path, dtype=torch.float32, device=CPU, operations=DeviceOperations())
        self.groups = layer_groups(config.layers, MAX_MODEL_LEN)
        num_blocks *= len(self.groups)
        self.limits = TableLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            num_device_blocks=num_blocks,
            vocab_size=VOCAB_SIZE,
            windows=tuple(group.window for group in self.groups),
            num_device_states=NUM_STATES if config.state_size else 0,
        )
        self.state_counts = {
            "num_device_states": self.limits.num_device_states,
            "num_host_states": NUM_STATES if config.state_size and num_host_blocks else 0,
        }
        state_sizes = {"state_size": config.state_size, **self.state_counts}
        self.num_host_blocks = num_host_blocks
        shape = cache_shape(config, self.groups, block_size, torch.float32)
        plain_cache = CacheEngine(shape, num_blocks, CPU, num_host_blocks, **state_sizes)
        attention = attention_shape(config, block_size, torch.float32, torch.float32, self.groups)
        plain_attention = TorchAttention(attention, CPU)
        gated = {} if grammars is None else {"grammars": grammars[0], "gates_grammars": True}
        self.plain = host_runner(model, plain_cache, plain_attention, self.limits, **gated)
        self.device = device or FakeDevice(seed)
        self.cache = CacheEngine(shape, num_blocks, CPU, num_host_blocks, self.device, **state_sizes)
        for cache in (plain_cache, self.cache):
            cache.storage[1:] = torch.nan  # unwritten content
            cache.states[1:] = torch.nan
        backend = DeviceAttention(attention.scorings(CPU), attention.group_of_layer)
        graphs = {"max_graph_batch_size": max_graph_batch_size, "max_graph_tokens": max_graph_tokens}
        own = grammars and grammars[1]
        self.runner = device_runner(
            model, self.cache, backend, SAMPLER, self.limits, self.device, grammars=own, **graphs
        )
        self.runner.computation.capture_graphs()
        for one in (self.plain, self.runner):
            one.table.masks.waits_for_all = True  # tests must not depend on the machine's speed
        self.num_planned: Counter[str] = Counter()

    def launch(self, plan: StepPlan) -> tuple[LaunchedStep, StepResult]:
        """Launch a plan on the device; return the launched step and the expected result."""
        self.num_planned.update({name: len(getattr(plan, name)) for name in (*COUNTED, *OF_STATES)})
        moved = (*plan.swap_out_device_blocks, *plan.swap_in_host_blocks)
        self.num_planned["moved states"] += sum(each >= FIRST_STATE_ID for each in moved)
        return self.runner.launch(plan), self.plain.execute(plan)

    def reset(self, epoch: int) -> None:
        self.reports: tuple[SimpleQueue[GrammarReport], ...] = (SimpleQueue(), SimpleQueue())
        self.runner.reset(epoch, self.reports[0].put)
        self.plain.reset(epoch, self.reports[1].put)

    def prepared(self, plan: StepPlan) -> list[int]:
        """Wait until both runners have prepared the grammars that a plan adds; return the ids of the grammars."""
        for added in plan.added_grammars:
            expected = GrammarReport(plan.epoch, added.grammar_id)
            assert [reports.get(timeout=20) for reports in self.reports] == [expected] * 2
        return [added.grammar_id for added in plan.added_grammars]


COUNTED = (
    "openings",
    "swap_out_host_blocks",
    "swap_in_host_blocks",
    "copy_source_blocks",
    "fork_source_slots",
    "append_tables",
    "set_block_tables",
    "append_token_slots",
)
OF_STATES = ("save_states", "set_state_slots")


def assert_equal(result: StepResult, expected: StepResult) -> None:
    """Compare tokens exactly, and log-probabilities up to the difference between two ways of computing them."""
    assert (result.epoch, result.step, result.statuses) == (expected.epoch, expected.step, expected.statuses)
    assert result.token_ids == expected.token_ids
    assert_near(result.logprobs, expected.logprobs)
    assert result.candidates.token_ids == expected.candidates.token_ids
    assert result.candidates.logprobs == pytest.approx(expected.candidates.logprobs, abs=1e-4)
    assert len(result.embeddings) == len(expected.embeddings)
    for embedding, other in zip(result.embeddings, expected.embeddings, strict=True):
        assert np.frombuffer(embedding, "<f4") == pytest.approx(np.frombuffer(other, "<f4"), abs=1e-5)
    assert len(result.prompt_logprobs) == len(expected.prompt_logprobs)
    for chunk, other in zip(result.prompt_logprobs, expected.prompt_logprobs, strict=True):
        assert (chunk.slot, chunk.first_position) == (other.slot, other.first_position)
        assert_near(chunk.logprobs, other.logprobs)


def assert_near(logprobs: Logprobs, expected: Logprobs) -> None:
    assert logprobs.ranks == expected.ranks
    assert possible(logprobs) == possible(expected)
    assert logprobs.chosen == pytest.approx(expected.chosen, abs=1e-4)
    assert logprobs.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)


def possible(logprobs: Logprobs) -> list[int]:
    """Return the most likely tokens without those that a grammar forbids, which are in no order."""
    pairs = zip(logprobs.top_token_ids, logprobs.top_logprobs, strict=True)
    return [token_id for token_id, logprob in pairs if logprob > -math.inf]


def received_plan(plan: StepPlan) -> StepPlan:
    """Return the plan as the worker receives it, with numbers in float32."""
    received = decode_request(encode_request(plan))
    assert isinstance(received, StepPlan)
    return received


class History:
    """The scheduler's core with a pair of runners, driven until all requests have ended."""

    def __init__(self, pair: Pair, depth: int, **limits: Any) -> None:
        self.pair = pair
        table = pair.limits
        self.scheduler = Scheduler(
            SchedulerOptions(
                max_num_seqs=table.max_num_seqs,
                max_num_batched_tokens=table.max_num_batched_tokens,
                max_model_len=table.max_model_len,
                pipeline_depth=depth,
                policy="priority",
                grammar_version="g",
                **limits,
            )
        )
        capacity = WorkerCapacity(
            worker_id="w",
            model_digest=b"m",
            vocab_size=VOCAB_SIZE,
            max_model_len=table.max_model_len,
            block_size=table.block_size,
            num_device_blocks=table.num_device_blocks,
            block_bytes=1,
            max_num_seqs=table.max_num_seqs,
            max_num_batched_tokens=table.max_num_batched_tokens,
            device="cuda",
            dtype="float32",
            attention_backend="reference",
            num_host_blocks=pair.num_host_blocks,
            swap_bandwidth=1e9 if pair.num_host_blocks else 0.0,
            layer_groups=tuple(LayerGroup(group.window, len(group.layers)) for group in pair.groups),
            grammar_version="g",
            gates_grammars=True,
            state_bytes=64 if table.num_device_states else 0,
            num_state_layers=1 if table.num_device_states else 0,
            **pair.state_counts,
        )
        pair.reset(1)
        self.scheduler.worker_joined(capacity, 1, 0.0)
        self.under_way: deque[tuple[LaunchedStep, StepResult]] = deque()
        self.num_tokens = 0
        self.num_embeddings = self.num_late = 0
        self.outputs: defaultdict[int, list[int]] = defaultdict(list)
        self.grammars: dict[int, Grammar] = {}  # by sequence

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> None:
        """Run requests. `arrivals`: (time, request) in order; a step takes 0.01."""
        now = 0.0
        coming = deque(arrivals)
        while coming or self.scheduler.has_requests or self.under_way:
            now += 0.01
            assert now < 100, "requests do not end"
            while coming and coming[0][0] <= now:
                with suppress(AdmissionError):  # it can never fit the cache
                    request = coming.popleft()[1]
                    sequence_ids = self.scheduler.add(request, now)
                    if request.grammar is not None:
                        self.grammars |= dict.fromkeys(sequence_ids, request.grammar)
            while (plan := self.scheduler.schedule(now)) is not None:
                received = received_plan(plan)
                self.under_way.append(self.pair.launch(received))
                for grammar_id in self.pair.prepared(received):
                    assert not self.scheduler.grammar_ready(grammar_id, "", now).ended
            self.scheduler.moved(self.pair.runner.last_moved_step(), now)
            if self.under_way:
                launched, expected = self.under_way.popleft()
                result = launched.result()
                assert_equal(result, expected)
                self.num_tokens += len(result.token_ids)
                self.num_embeddings += len(result.embeddings)
                self.num_late += result.statuses.count(RowStatus.LATE)
                self._take(self.scheduler.complete(replace(result, duration_us=1000), now))
            self.scheduler.check()

    def _take(self, outputs: TokenOutputs) -> None:
        for sequence_id, token_id in zip(outputs.sequence_ids, outputs.token_ids, strict=True):
            self.outputs[sequence_id].append(token_id)
        for found in outputs.hypotheses:
            self.outputs[found.sequence_id].extend(found.token_ids)
        assert {end.reason for end in outputs.ended} <= {EndReason.STOP, EndReason.LENGTH}


def random_sampling(rng: random.Random, *, is_beam: bool) -> SamplingParams:
    """Return a random mix of sampling parameters."""
    fields: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0, 1.3])}
    if rng.random() < 0.5:
        fields |= {"top_k": rng.choice([0, 5, 400]), "top_p": rng.choice([1.0, 0.9]), "min_p": rng.choice([0.0, 0.02])}
    if rng.random() < 0.25:
        penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
        fields |= dict(rng.sample(sorted(penalties.items()), rng.randint(1, 3)))
    if rng.random() < 0.2:
        num = rng.randint(1, 4)
        fields["logit_bias_token_ids"] = tuple(rng.sample(range(VOCAB_SIZE), num))
        fields["logit_bias_values"] = tuple(rng.choice([-5.0, 3.0, 40.0]) for _ in range(num))
    if rng.random() < 0.3:
        fields["stop_token_ids"] = tuple(rng.sample(range(VOCAB_SIZE + 5), 4))
        fields["min_tokens"] = rng.choice([0, 4])
    if rng.random() < 0.2 and not is_beam:
        fields["num_logprobs"] = rng.choice([0, 1, 4, VOCAB_SIZE])
        if fields["num_logprobs"] == 4:
            fields["logprob_token_ids"] = rng.choice([(), tuple(rng.sample(range(VOCAB_SIZE), 4))])
    if rng.random() < 0.2:
        fields["num_prompt_logprobs"] = rng.choice([0, 2])
    return SamplingParams(**fields)


def random_request(rng: random.Random, index: int) -> Request:
    is_beam = rng.random() < 0.2
    sampling = random_sampling(rng, is_beam=is_beam)
    shared = random.Random(rng.choice([1, 2]))  # prompts share their beginning, so that blocks are shared
    prompt = [shared.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 9, 20]))]
    prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 2, 7, 30]))]
    num_beams = rng.choice([2, 3])
    if is_beam:
        num_candidates = min(VOCAB_SIZE, (1 + len(sampling.stop_token_ids)) * num_beams)
        sampling = replace(sampling, num_candidates=max(2, num_candidates))
    return Request(
        request_id=f"r{index}",
        tenant="",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=rng.randint(1, 25),
        seed=rng.getrandbits(64),
        n=num_beams if is_beam else rng.choice([1, 1, 2, 3]),
        beam=BeamParams(num_beams, 1.0, EarlyStopping.HEURISTIC) if is_beam else None,
    )


def random_embedding(rng: random.Random, pooling: Pooling) -> Request:
    prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([1, 20, 60])))
    return Request(pooling.name, "", prompt, SamplingParams(pooling=pooling), max_tokens=0)


def run_history(path: Path, seed: int, *, depth: int, preemption: PreemptionMode | None = None, **options: Any) -> Pair:
    """Run random requests, which arrive while others run, with a cache so small that some are preempted."""
    rng = seeded(seed)
    pair = Pair(path, seed, **{"num_blocks": 40, **options})
    history = History(pair, depth, preemption=preemption or rng.choice(list(PreemptionMode)))
    arrivals = sorted((rng.choice([0.0, 0.2, 0.4]), index) for index in range(8))
    requests = [(at, random_request(rng, index)) for at, index in arrivals]
    poolings = (Pooling.LAST, Pooling.MEAN)
    requests += [(rng.choice([0.0, 0.2]), random_embedding(rng, pooling)) for pooling in poolings]
    history.run(sorted(requests, key=itemgetter(0)))
    assert history.num_tokens > len(arrivals)
    assert history.num_embeddings == 2
    return pair


# Pipeline depth, and the sizes up to which there are graphs: in decoding rows, and in tokens.
HISTORIES = [(1, 5, 0), (2, 0, 0), (2, 5, 0), (2, 3, 32)]
# Models that differ in the runner's work: with windows, with experts, with states, and with none of these. Others only
# run the last history.
WITH_ALL_HISTORIES = ("qwen3", "gemma3_text", "gpt_oss", "lfm2")


@pytest.mark.parametrize(
    ("family", "depth", "max_graph_batch_size", "max_graph_tokens"),
    [
        (family, *history)
        for family in FAMILIES
        for history in (HISTORIES if family in WITH_ALL_HISTORIES else HISTORIES[-1:])
    ],
)
def test_results_are_those_of_the_plain_runner(
    checkpoints: dict[str, Path], family: str, depth: int, max_graph_batch_size: int, max_graph_tokens: int
) -> None:
    options = {"num_host_blocks": 20, "max_graph_batch_size": max_graph_batch_size}
    options["max_graph_tokens"] = max_graph_tokens
    pair = run_history(checkpoints[family], 10 * depth + max_graph_batch_size, depth=depth, **options)
    num_mixed = len(token_counts(max_graph_tokens, 48))
    assert sum(graph.num_replays for graph in pair.device.graphs[num_mixed:]) > 5 or not max_graph_batch_size
    assert sum(graph.num_replays for graph in pair.device.graphs[:num_mixed]) > 5 or not num_mixed


def test_histories_cover_every_plan_field(checkpoints: dict[str, Path]) -> None:
    """Swaps especially: S3 and S4 at depth 2, and moves that begin after the previous plan's computation."""
    num_planned: Counter[str] = Counter()
    for seed in range(4):
        options = {"num_blocks": 25, "num_host_blocks": 40, "max_graph_batch_size": 6}
        pair = run_history(checkpoints["qwen3"], seed, depth=2, preemption=PreemptionMode.SWAP, **options)
        num_planned += pair.num_planned
    print(num_planned)
    assert min(num_planned[name] for name in COUNTED) > 20


def test_states_are_saved_and_swapped(checkpoints: dict[str, Path]) -> None:
    num_planned: Counter[str] = Counter()
    for seed, family in enumerate(("lfm2", "qwen3_5_text")):
        options = {"num_blocks": 25, "num_host_blocks": 40, "max_graph_batch_size": 6, "max_graph_tokens": 32}
        pair = run_history(checkpoints[family], seed, depth=2, preemption=PreemptionMode.SWAP, **options)
        assert sum(graph.num_replays for graph in pair.device.graphs) > 5
        num_planned += pair.num_planned
    print(num_planned)
    assert min(num_planned[name] for name in ("moved states", "save_states")) > 20
    assert num_planned["set_state_slots"]


@pytest.mark.parametrize("late_rate", [0.0, 0.4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_masks_belong_to_the_tokens_before_them(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, depth: int, late_rate: float
) -> None:
    """Gated rows with grammars, some late, run beside rows without: samples and beams, some of them preempted."""
    seed = depth + 10 * bool(late_rate)
    print("seed", seed)
    monkeypatch.setattr(MaskCost, "observe", lambda self, seconds: None)  # rows are late in both runners alike
    rng = random.Random(seed)
    compiler = GrammarCompiler(letters_tokenizer(), VOCAB_SIZE)
    grammars = [
        EpochGrammars(CompileThread(lambda: GrammarCompiler(letters_tokenizer(), VOCAB_SIZE).compile), 151)
        for _ in range(2)
    ]
    pair = Pair(checkpoints["qwen3"], seed, num_blocks=40, num_host_blocks=20, grammars=(grammars[0], grammars[1]))
    for runner in (pair.plain, pair.runner) if late_rate else ():
        runner.table.masks.queue, runner.table.masks.waits_for_all = LateQueue(seed, late_rate), False
    history = History(pair, depth, preemption=PreemptionMode.SWAP)
    requests = [(rng.choice([0.0, 0.2]), bound(rng, random_request(rng, index))) for index in range(10)]
    history.run(sorted(requests, key=itemgetter(0)))
    assert sum(len(history.outputs[sequence_id]) for sequence_id in history.grammars) > 30
    assert history.num_late > 20 if late_rate else not history.num_late
    for sequence_id, grammar in history.grammars.items():
        matcher = compiler.compile(grammar.kind.name.lower(), grammar.text, grammar.end_token_ids)
        matcher.consume(history.outputs[sequence_id])
    for one in grammars:
        one.close()


def test_a_worker_on_a_device_says_that_it_gates_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loaded worker and its table both gate grammars."""
    assemble = loader._RunnerParts
    monkeypatch.setattr(loader, "_RunnerParts", lambda **parts: replace(assemble(**parts), streams=FakeDevice(1)))
    monkeypatch.setattr(loader, "create_sampler", lambda vocab_size: SAMPLER)
    config = WorkerConfig(model="models/storyteller", device="cpu", num_device_blocks=8, max_graph_batch_size=0)
    worker = load_worker(config, "w")
    try:
        assert worker.ready.gates_grammars
        assert isinstance(worker.runner, ModelRunner)
        assert worker.runner.table.gates_grammars
    finally:
        worker.close()


def bound(rng: random.Random, request: Request) -> Request:
    """Return the request, in most cases with a grammar."""
    if rng.random() < 0.3:
        return request
    text = rng.choice(["[a-e]{3,20}", "([a-d]{2} ?)+!", "x?[0-9]{4}(-[0-9]{2}){1,5}"])
    grammar = Grammar(GrammarKind.REGEX, text, (END_TOKEN_ID,))
    sampling = request.sampling
    if sampling.num_candidates is not None:
        sampling = replace(sampling, num_candidates=sampling.num_candidates + 1)
    return replace(request, grammar=grammar, sampling=sampling)


@pytest.mark.parametrize("guard", Guard, ids=lambda guard: guard.name)
def test_a_missing_guard_shows(checkpoints: dict[str, Path], guard: Guard) -> None:
    """Every guard is needed: without it, some order of the streams gives another result.

    As long as fewer plans are in flight than uploads are kept, no upload is overwritten before it was read.
    """
    for seed in range(30):
        try:
            options = {"num_blocks": 25, "num_host_blocks": 40, "device": FakeDevice(seed, dropped=guard)}
            run_history(checkpoints["qwen2"], seed, depth=4, preemption=PreemptionMode.SWAP, **options)
        except (AssertionError, IndexError, WorkerProtocolError) as error:
            print("seen with seed", seed, repr(error)[:200])
            return
    pytest.fail(f"no test notices that not {guard.value}")


# Steps by hand


def opening(
    slot: int, tokens: Sequence[int], blocks: Sequence[int], sampling: SamplingParams = GREEDY, **fields: Any
) -> RowOpening:
    return RowOpening(
        slot, slot, tuple(tokens), len(tokens), 0, tuple(blocks), sampling, **{"seed": 3, "sample_index": 0} | fields
    )


def random_tokens(seed: int, num: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(num)]


def assert_all_equal(pair: Pair, plans: Sequence[StepPlan]) -> list[StepResult]:
    """Launch all plans before any result is read, and compare all results."""
    under_way = [pair.launch(plan) for plan in plans]
    results = []
    for launched, expected in under_way:
        results.append(launched.result())
        assert launched.is_done()
        assert_equal(results[-1], expected)
    return results


@pytest.mark.parametrize("max_graph_batch_size", [0, 6])
def test_tokens_feed_the_next_step_on_the_device(checkpoints: dict[str, Path], max_graph_batch_size: int) -> None:
    """Every plan is launched before any result is read."""
    draw = SamplingParams(temperature=1.0, top_p=0.95)
    rows = [
        Row(random_tokens(i, length), 10, sampling, seed=i << 33, sample_index=i)
        for i, (length, sampling) in enumerate([(3, GREEDY), (31, draw), (9, draw), (17, GREEDY), (1, draw)])
    ]
    pair = Pair(checkpoints["llama"], 1, max_graph_batch_size=max_graph_batch_size)
    steps = plan_steps(rows, block_size=4, max_num_batched_tokens=20)
    results = assert_all_equal(pair, [step.plan for step in steps])
    assert sum(len(result.token_ids) for result in results) == 50


@pytest.mark.parametrize(
    ("family", "num_groups", "max_graph_batch_size", "max_graph_tokens"),
    [
        ("gpt_oss", 2, 6, 32),
        ("gpt_oss", 2, 0, 0),
        ("gemma3_text", 6, 6, 0),
        ("gemma3_text", 6, 6, 32),
        ("mistral", 1, 6, 32),
    ],
)
def test_layer_groups_use_the_same_blocks_in_turn(
    checkpoints: dict[str, Path], family: str, num_groups: int, max_graph_batch_size: int, max_graph_tokens: int
) -> None:
    """Blocks before a window are filled with NaN and used again, by any row and layer group."""
    draw = SamplingParams(temperature=1.0, top_p=0.95)
    rows = [
        Row(random_tokens(i, length), 12, sampling, seed=i, sample_index=i)
        for i, (length, sampling) in enumerate([(70, draw), (31, GREEDY), (3, draw), (50, GREEDY)])
    ]
    graphs = {"max_graph_batch_size": max_graph_batch_size, "max_graph_tokens": max_graph_tokens}
    pair = Pair(checkpoints[family], 9, **graphs)
    assert len(pair.groups) == num_groups
    options = {"windows": pair.limits.windows, "max_num_seqs": pair.limits.max_num_seqs, "rng": random.Random(9)}
    steps = plan_steps(rows, block_size=4, max_num_batched_tokens=20, **options)
    opened = [opening.block_ids for step in steps for opening in step.plan.openings]
    written = [block for blocks in (*opened, *(step.plan.append_block_ids for step in steps)) for block in blocks]
    assert len(written) > 1.2 * len(set(written)), "few blocks are used again"
    under_way = []
    for step in steps:
        under_way.append(pair.launch(step.plan))
        unused = torch.tensor(step.free_blocks, dtype=torch.int64)
        pair.plain._cache.storage[unused] = torch.nan
        pair.device.compute.run(partial(pair.cache.storage.index_fill_, 0, unused, torch.nan))
    for launched, expected in under_way:
        assert_equal(launched.result(), expected)
    assert sum(len(expected.token_ids) for _, expected in under_way) == 48


def test_nan_logits_fail_their_row_only(checkpoints: dict[str, Path]) -> None:
    """The rows sample a token, report log-probabilities, or belong to a beam."""
    samplings = (GREEDY, SamplingParams(num_logprobs=2), SamplingParams(num_candidates=3), GREEDY)
    pair = Pair(checkpoints["qwen2"], 2, max_graph_batch_size=4)
    openings = tuple(
        opening(slot, random_tokens(slot, 6), (2 * slot + 1, 2 * slot + 2), sampling)
        for slot, sampling in enumerate(samplings)
    )
    assert_all_equal(pair, [StepPlan(1, 1, openings=openings, work_slots=(0, 1, 2, 3), work_num_tokens=(6,) * 4)])
    for poisoned in (1, 3, 5):
        pair.plain._cache.storage[poisoned] = torch.nan
        pair.device.compute.run(lambda block=poisoned: pair.cache.storage[block].fill_(torch.nan))
    beam = {"append_token_slots": (2,), "append_token_ids": (1,), "work_slots": (2,), "work_num_tokens": (1,)}
    results = assert_all_equal(pair, [StepPlan(1, 2, **beam), StepPlan(1, 3)])
    bad, good = RowStatus.NAN_LOGITS, RowStatus.OK
    assert [result.statuses for result in results] == [(bad, bad, bad, good), (bad, bad, good)]
    assert (results[0].logprobs, results[0].candidates) == (Logprobs(), Candidates())


def test_bad_plan_raises_before_anything_is_launched(checkpoints: dict[str, Path]) -> None:
    pair = Pair(checkpoints["qwen2"], 3, num_blocks=3, num_host_blocks=2)
    pair.device.synchronize()
    before = pair.cache.storage.clone()
    good = opening(0, [1, 2, 3], (1,))
    for columns in (
        {"openings": (replace(good, block_ids=(4,)),)},
        {"openings": (good,), "copy_source_blocks": (1,), "copy_target_blocks": (4,)},
        {"openings": (good,), "swap_in_host_blocks": (1,), "swap_in_device_blocks": (9,)},
    ):
        with pytest.raises(WorkerProtocolError) as raised:
            pair.runner.launch(StepPlan(1, 1, work_slots=(0,), work_num_tokens=(3,), **columns))
        assert not pair.runner.is_fatal(raised.value)
        pair.runner.reset(2)
    pair.device.synchronize()
    assert torch.equal(pair.cache.storage.view(torch.int32), before.view(torch.int32))


def test_next_epoch_begins_with_empty_rows(checkpoints: dict[str, Path]) -> None:
    """Nothing remains of steps in flight, or of the rows in the slots."""
    pair = Pair(checkpoints["qwen3"], 4, max_graph_batch_size=4)
    for epoch in (1, 2, 3):
        pair.reset(epoch)
        penalties = SamplingParams(temperature=1.0, frequency_penalty=0.5 * epoch, repetition_penalty=1.2)
        rows = [Row(random_tokens(epoch + i, 5 + epoch), 6, (penalties, GREEDY)[i]) for i in range(2)]
        steps = plan_steps(rows, block_size=4, max_num_batched_tokens=9, epoch=epoch)
        assert_all_equal(pair, [step.plan for step in steps[:-2]])
        for step in steps[-2:]:
            pair.launch(step.plan)  # the result is not read


def test_plan_without_work_is_done_at_once(checkpoints: dict[str, Path]) -> None:
    began = time.perf_counter()
    launched = Pair(checkpoints["qwen2"], 5).runner.launch(StepPlan(1, 1))
    assert launched.is_done()
    assert replace(launched.result(), duration_us=0) == StepResult(1, 1, last_moved_step=1)
    assert launched.result().duration_us < (time.perf_counter() - began) * 1e6


def test_engine_and_resolver_share_the_device(checkpoints: dict[str, Path]) -> None:
    """One thread launches while the other waits, in two epochs, of which the first is cut short."""
    pair = Pair(checkpoints["qwen2"], 8, max_graph_batch_size=4)
    engine = Engine(lambda: LoadedWorker(pair.runner, READY))
    loaded: SimpleQueue[Exception | None] = SimpleQueue()
    engine.start(loaded.put)
    assert loaded.get(timeout=20) is None
    for epoch, num_read in ((1, 3), (2, None)):
        rows = [Row(random_tokens(i, 9), 20, SamplingParams(temperature=0.5 * i), seed=i) for i in range(4)]
        plans = [step.plan for step in plan_steps(rows, block_size=4, max_num_batched_tokens=30, epoch=epoch)]
        outcomes: SimpleQueue[Outcome] = SimpleQueue()
        session, begun = EngineSession(outcomes.put), threading.Event()
        engine.begin(session, epoch, begun.set)
        assert begun.wait(20)
        for plan in plans:
            engine.submit(session, plan)
        pair.plain.reset(epoch)
        for plan in plans[:num_read]:
            assert_equal(outcomes.get(timeout=20), pair.plain.execute(plan))
        session.end()
    assert engine.stop(20)


# Graphs


@pytest.mark.parametrize(
    ("max_graph_batch_size", "max_num_seqs", "sizes"),
    [
        (0, 256, ()),
        (1, 256, (1,)),
        (3, 256, (1, 2, 3)),
        (256, 6, (1, 2, 4, 6)),
        (33, 40, (1, 2, 4, 8, 16, 24, 32, 33)),
        (256, 1000, (1, 2, 4, *range(8, 257, 8))),
    ],
)
def test_graph_sizes(max_graph_batch_size: int, max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_graph_batch_size, max_num_seqs) == sizes


def test_graphs_are_captured_largest_first_and_the_next_larger_is_replayed(checkpoints: dict[str, Path]) -> None:
    pair = Pair(checkpoints["qwen2"], 6, block_size=8, max_num_seqs=7, max_graph_batch_size=5)
    graphs = pair.device.graphs  # for each size: the forward pass alone, then with sampling
    assert len(graphs) == 2 * len((5, 4, 2, 1))
    told = SamplingParams(num_logprobs=1)
    prompts = [opening(slot, random_tokens(slot, 3), (slot + 1, slot + 11), GREEDY) for slot in range(6)]
    prompts.append(opening(6, [7, 8, 9], (7, 17), told))
    work = {"work_slots": tuple(range(7)), "work_num_tokens": (3,) * 7}
    plans = [StepPlan(1, 1, openings=tuple(prompts), **work), StepPlan(1, 2)]
    replays = [[0] * 8, [0] * 8]  # seven rows: there is no graph of that size
    for step, (released, graph) in enumerate(
        [((0, 1), 0), ((2,), 2), ((3,), 2), ((4,), 4), ((5,), 6)], start=len(plans) + 1
    ):
        plans.append(StepPlan(1, step, released))
        replays.append(replays[-1].copy())
        replays[-1][graph] += 1  # a row that reports log-probabilities samples outside the graph
    plans += [StepPlan(1, 8, (6,), openings=(opening(0, [1, 2], (1, 11)),), work_slots=(0,), work_num_tokens=(2,))]
    plans += [StepPlan(1, 9)]
    replays += [replays[-1], [count + (place == 7) for place, count in enumerate(replays[-1])]]
    for plan, expected in zip(plans, replays, strict=True):
        assert_all_equal(pair, [plan])
        assert [graph.num_replays for graph in graphs] == expected


@pytest.mark.parametrize(
    ("max_graph_tokens", "max_num_batched_tokens", "counts"),
    [
        (0, 48, ()),
        (5, 48, (5,)),
        (512, 48, (16, 32, 48)),
        (250, 4096, (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 250)),
        (512, 4096, (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)),
    ],
)
def test_numbers_of_tokens_of_graphs(
    max_graph_tokens: int, max_num_batched_tokens: int, counts: tuple[int, ...]
) -> None:
    assert token_counts(max_graph_tokens, max_num_batched_tokens) == counts


@pytest.mark.parametrize("seed", range(6))
def test_steps_with_prompts_replay_the_graph_of_the_next_larger_number_of_tokens(
    checkpoints: dict[str, Path], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts run beside decoding rows, in steps of exactly a graph's size, smaller and larger."""
    rng = random.Random(seed)
    options = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 7, "max_graph_batch_size": 2}
    pair = Pair(checkpoints["qwen3"], seed, **options, max_graph_tokens=32)
    told = SamplingParams(temperature=0.8, num_logprobs=2, num_prompt_logprobs=1)
    rows = [Row(random_tokens(seed + i, rng.randint(1, 40)), 8, rng.choice([GREEDY, told]), seed=i) for i in range(7)]
    budget = rng.choice([16, 19, 32, 37])
    expected: Counter[int] = Counter()
    apply = pair.plain.table.apply

    def count(plan: StepPlan) -> WorkingRows:
        worked = apply(plan)
        num_tokens = int(worked.num_new_tokens.sum())
        if len(worked.slots) > 2 or not worked.samples.all() or num_tokens > len(worked.slots):
            expected[next((size for size in (16, 32) if num_tokens <= size), 0)] += 1
        return worked

    monkeypatch.setattr(pair.plain.table, "apply", count)
    assert_all_equal(pair, [step.plan for step in plan_steps(rows, block_size=4, max_num_batched_tokens=budget)])
    print("steps by size of their graph:", expected)
    assert [graph.num_replays for graph in pair.device.graphs[:2]] == [expected[32], expected[16]]
    assert expected[16] > 0


class TwoRanks(SingleRank):
    """A rank whose shard is the whole model, and that records its epochs."""

    size = 2

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.num_graphs: list[int] = []  # the number of graphs when an epoch began

    def begin(self, epoch: int) -> None:
        self.num_graphs.append(len(self._device.graphs))


@pytest.mark.parametrize("seed", range(3))
def test_ranks_capture_at_the_first_plan_of_each_epoch_and_replay_no_graph_of_another(
    checkpoints: dict[str, Path], seed: int
) -> None:
    pair = Pair(checkpoints["qwen3"], seed, max_graph_batch_size=4, max_graph_tokens=16)
    computation, device = pair.runner.computation, pair.device
    ranks = TwoRanks(device)
    pair.runner = ModelRunner(computation, pair.cache, ranks, splits_steps=False)
    num_graphs, past = computation.num_graphs, []
    assert num_graphs == 2 * len((1, 2, 4)) + 1
    for epoch in (1, 2, 3):
        pair.reset(epoch)
        with pytest.raises(KeyError):  # nothing is left of the previous epoch
            computation._graphs.forward(4)
        past = [(graph, graph.num_replays) for graph in device.graphs]
        rows = [Row(random_tokens(10 * seed + epoch + i, 5 + 3 * i), 6) for i in range(3)]
        steps = plan_steps(rows, block_size=4, max_num_batched_tokens=12, epoch=epoch)
        assert_all_equal(pair, [step.plan for step in steps])
        assert all(graph.num_replays == count for graph, count in past)
        own = device.graphs[len(past) :]
        assert len(own) == num_graphs
        assert own[0].num_replays > 0
        assert sum(graph.num_replays for graph in own[1:]) > 0
    assert ranks.num_graphs == [num_graphs, 2 * num_graphs, 3 * num_graphs]


class ScarceDevice(FakeDevice):
    """A device without enough memory for some captures, which are numbered from 0 in the order of the attempts."""

    def __init__(self, seed: int, too_large: set[int], *, is_carried_out: bool) -> None:
        super().__init__(seed)
        self._too_large = too_large
        self._is_carried_out = is_carried_out  # whether the operation runs before it is captured
        self.num_tried = 0

    def capture(self, operation: StreamWork) -> FakeGraph:
        self.num_tried += 1
        if self.num_tried - 1 not in self._too_large:
            return super().capture(operation)
        if self._is_carried_out:
            self.compute.run(operation)
            self.synchronize()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


SCARCE = {"max_graph_batch_size": 5, "max_graph_tokens": 32}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def graphs_for(pair: Pair) -> tuple[list[int | None], list[int | None]]:
    """Return the graphs for steps of 1 to 6 decoding rows, and for 16 and 32 tokens of any rows."""
    computation = pair.runner.computation
    return [computation._graphs.captured.size_for(size) for size in range(1, 7)], [
        computation._mixed_graphs.captured.size_for(num_tokens) for num_tokens in (16, 32)
    ]


@pytest.mark.parametrize("is_carried_out", [False, True])
@pytest.mark.parametrize(
    ("too_large", "of_rows", "of_tokens", "told"),
    [  # captures in order: 32 and 16 tokens; then 5, 4, 2 and 1 rows, first without and then with sampling
        ({0}, [1, 2, 4, 4, 5, None], [16, None], ["1 of 2 numbers of tokens, 32 to 32"]),
        ({0, 1}, [1, 2, 4, 4, 5, None], [None, None], ["2 of 2 numbers of tokens, 16 to 32"]),
        ({2}, [1, 2, None, None, None, None], [16, 32], ["2 of 4 batch sizes, 4 to 5"]),
        ({3}, [1, 2, None, None, None, None], [16, 32], ["2 of 4 batch sizes, 4 to 5"]),
        ({6}, [1, 4, 4, 4, 5, None], [16, 32], ["1 of 4 batch sizes, 2 to 2"]),
        ({0, 2, 3, 4}, [None] * 6, [16, None], ["1 of 2 numbers of tokens, 32 to 32", "4 of 4 batch sizes, 1 to 5"]),
    ],
)
def test_graphs_that_do_not_fit_are_skipped(
    checkpoints: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    too_large: set[int],
    of_rows: list[int | None],
    of_tokens: list[int | None],
    told: list[str],
    is_carried_out: bool,
) -> None:
    device = ScarceDevice(21, too_large, is_carried_out=is_carried_out)
    pair = Pair(checkpoints["qwen3"], 21, **SCARCE, device=device)
    assert graphs_for(pair) == (of_rows, of_tokens)
    for text, what in zip(warnings_of(caplog), told, strict=True):
        assert f"does not hold graphs for {what}: steps of these sizes use the next larger graph or launch" in text
    rows = [Row(random_tokens(i, 3 + 9 * i), 4 + i) for i in range(6)]
    for step in plan_steps(rows, block_size=4, max_num_batched_tokens=32):
        assert_all_equal(pair, [step.plan])


def test_graphs_that_do_not_fit_a_rank_end_one_epoch_and_no_other(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks wait in the middle of a capture, and only a new epoch can inform them."""
    num_captures = 2 + 2 * 4  # of any epoch; the pair makes the first ones itself
    device = ScarceDevice(22, {num_captures}, is_carried_out=False)
    pair = Pair(checkpoints["qwen3"], 22, **SCARCE, device=device)
    assert device.num_tried == num_captures
    pair.runner = ModelRunner(pair.runner.computation, pair.cache, TwoRanks(device), splits_steps=False)
    for epoch in (1, 2, 3):
        pair.reset(epoch)
        rows = [Row(random_tokens(i, 3 + 9 * i), 4 + i) for i in range(6)]
        steps = plan_steps(rows, block_size=4, max_num_batched_tokens=32, epoch=epoch)
        if epoch == 1:
            with pytest.raises(torch.OutOfMemoryError):
                pair.runner.launch(steps[0].plan)
            assert not warnings_of(caplog)
            continue
        assert_all_equal(pair, [step.plan for step in steps])
        assert graphs_for(pair) == ([1, 2, 4, 4, 5, None], [16, None])
        (text,) = warnings_of(caplog)
        assert "does not hold graphs for 1 of 2 numbers of tokens, 32 to 32" in text


def test_rank_skips_graphs_that_do_not_fit_its_peer(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    class ScarcePeer(TwoRanks):
        """A rank whose peer had no memory for the graphs of 4 and 5 rows."""

        flags = torch.tensor([0, 0, 1, 1], dtype=torch.int32)

        def all_reduce(self, x: Tensor) -> Tensor:
            return x + self.flags if x.dtype == torch.int32 and len(x) == len(self.flags) else x

    pair = Pair(checkpoints["qwen3"], 23, **SCARCE)
    pair.runner = ModelRunner(pair.runner.computation, pair.cache, ScarcePeer(pair.device), splits_steps=False)
    for epoch in (1, 2):
        pair.reset(epoch)
        rows = [Row(random_tokens(i, 3 + 9 * i), 4 + i) for i in range(6)]
        steps = plan_steps(rows, block_size=4, max_num_batched_tokens=32, epoch=epoch)
        assert_all_equal(pair, [step.plan for step in steps])
        assert graphs_for(pair) == ([1, 2, None, None, None, None], [16, 32])
    (text,) = warnings_of(caplog)
    assert "does not hold graphs for 2 of 4 batch sizes, 4 to 5" in text


def test_rows_of_padding_touch_nothing(checkpoints: dict[str, Path]) -> None:
    pair = Pair(checkpoints["qwen3"], 7, max_graph_batch_size=6)
    start = opening(2, random_tokens(1, 7), (3, 4, 5))
    assert_all_equal(pair, [StepPlan(1, 1, openings=(start,), work_slots=(2,), work_num_tokens=(7,))])
    before, tokens = pair.cache.storage.clone(), pair.runner.computation._device_table.token_ids[:-1].clone()
    pair.runner.computation.run_graphs_uncaptured()
    assert_all_equal(pair, [StepPlan(1, 2)])
    assert pair.device.graphs[-1].num_replays == 1
    graphs, no_rows = pair.runner.computation._graphs, np.empty(0, np.int64)
    padding = torch.from_numpy(graphs.padded(no_rows, no_rows, None, 1))
    pair.device.compute.run(lambda: graphs.set_rows(padding))
    for graph in pair.device.graphs[-2:]:
        graph.replay()
    pair.device.synchronize()
    changed = (pair.cache.storage.view(torch.int32) != before.view(torch.int32)).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [4], "the row's own block"
    assert (pair.runner.computation._device_table.token_ids[:-1] != tokens).nonzero().tolist() == [[2, 8]]


# Time


def test_step_time_is_measured_from_the_previous_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepTimer()
    now_us = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_us * 1000)
    now_us = 700
    assert clock.duration_us(100_000) == 600
    now_us = 1000
    assert clock.duration_us(200_000) == 300, "launched while the one before was computed"
    now_us = 2000
    assert clock.duration_us(1_500_000) == 500, "launched when the device had nothing to do"
